"""What watching costs: time of a step, size of the log, and the report of a run of 100,000 steps.

    python bench/watching.py [--pairs 1500] [--steps 100000]

Time: steps of a model with the recorder on and off, in turns within one process; the median of the paired differences
with its 95 % interval, and beside it what the spans cost while it is off, and the processor time of the thread that
writes the log. As every run is watched, with nine microbatches, which are 20 spans a step.
Size: of that log, a minute and rank. Report: logs of four ranks with 20 spans a step, written by the real packer, read
and analysed in a process of its own.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy
import torch
from keep import keep
from torch import Tensor, nn

from meshwise.recording.recording import Recording
from meshwise.records.files import append_lines
from meshwise.records.folder import begin_session, end_session, span_log
from meshwise.spec.world import World
from meshwise.timeline.pack import pack
from meshwise.timeline.recorder import Recorder, make_current
from meshwise.timeline.span_log import VERSION

LAYERS, WIDTH = 8, 256


class Layers(nn.Module):
    """Eight blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(LAYERS))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


class Block(nn.Module):
    """One of them."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.linear(x))


@dataclass
class Side:
    """A model with its optimizer and recorder; `step` is one training step as the loop takes it."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    recorder: Recorder
    microbatches: int
    samples: int
    steps: int = 0

    def step(self) -> float:
        make_current(self.recorder)
        began = time.perf_counter()
        self.steps += 1
        self.recorder.begin_step(self.steps)
        with self.recorder.span("data", on_device=False):
            batches = torch.ones(self.microbatches, self.samples // self.microbatches, WIDTH)
        for x in batches:
            with self.recorder.span("forward"):
                loss = self.model(x)
            with self.recorder.span("backward"):
                loss.backward()
        with self.recorder.span("optimizer"):
            self.optimizer.step()
            self.optimizer.zero_grad()
        return time.perf_counter() - began


def side(recorder: Recorder, microbatches: int, samples: int) -> Side:
    """One side of the comparison."""
    torch.manual_seed(0)
    model = Layers()
    return Side(model, torch.optim.SGD(model.parameters(), lr=0.01), recorder, microbatches, samples)


def cost(pairs: int, microbatches: int, samples: int) -> dict[str, Any]:
    """Watched against not, in turns."""
    torch.set_num_threads(1)
    folder = Path(tempfile.mkdtemp())
    recording = Recording(World(), folder)
    log = recording._log
    assert log is not None
    watched = side(recording.recorder, microbatches, samples)
    times: tuple[list[float], list[float]] = ([], [])
    for number in range(pairs + 50):
        for which in (0, 1) if number % 2 else (1, 0):
            recording.recorder.on = which == 0
            taken = watched.step()
            if number >= 50:
                times[which].append(taken)
    recording.recorder.on = True
    recording.close()
    steps = pairs + 50
    size = span_log(folder, 0).stat().st_size
    on, off = (numpy.array(seconds) for seconds in times)
    difference = on - off
    draws = numpy.random.default_rng(0).integers(0, pairs, (2000, pairs))
    low, high = numpy.percentile(numpy.median(difference[draws], axis=1), [2.5, 97.5])
    step = float(numpy.median(off))
    thread = log.cpu_seconds / steps
    off_us = spans_while_off()
    return {
        "pairs": pairs,
        "spans_a_step": 20,
        "step_ms": step * 1e3,
        "more_us": float(numpy.median(difference)) * 1e6,
        "more_us_low": float(low) * 1e6,
        "more_us_high": float(high) * 1e6,
        "spans_while_off_us": off_us,
        "log_thread_us": thread * 1e6,
        "share": (float(numpy.median(difference)) + off_us / 1e6 + thread) / step,
        "log_bytes_a_step": size / steps,
        "log_mb_a_minute": size / steps * 60 / step / 1e6,
    }


def spans_while_off() -> float:
    """What 20 spans cost a step while nothing is recorded, us: two readings of the clock each."""
    recorder, steps = Recorder(on=False), 5_000
    began = time.perf_counter()
    for _ in range(steps * 20):
        with recorder.span("forward"):
            pass
    return (time.perf_counter() - began) / steps * 1e6


def phases_alone() -> dict[str, float]:
    """The bare cost of the spans that every run has: data, forward, backward, one all-reduce, optimizer."""
    recorder = Recorder()
    code = recorder.code("communication", "all-reduce", "communication")
    steps, taken = 20_000, []
    for _ in range(9):
        began = time.perf_counter()
        for number in range(steps):
            recorder.begin_step(number)
            for kind in ("data", "forward", "backward", "optimizer"):
                with recorder.span(kind):
                    pass
            recorder.add(code, recorder.mark(), recorder.mark(), 4096, recorder.arrive())
        taken.append((time.perf_counter() - began) / steps)
        recorder.drain()
    return {"us_a_step": float(numpy.median(taken)) * 1e6, "least": min(taken) * 1e6, "most": max(taken) * 1e6}


def write_long_run(folder: Path, steps: int, ranks: int = 4, spans: int = 20) -> None:
    """The logs of a run of `steps` steps of about 50 ms: phases, blocks, an all-reduce."""
    begin_session(folder, time.time() - steps * 0.05, job="long", devices=["cpu"] * ranks)
    kinds = [("data", "main", ""), ("forward", "main", ""), ("backward", "main", ""), ("optimizer", "main", "")]
    kinds += [("communication", "communication", "all-reduce")]
    kinds += [("forward", "blocks", f"layers.{number}") for number in range(spans - len(kinds))]
    share = numpy.array([0.05, 0.3, 0.5, 0.1, 0.15] + [0.015] * (spans - 5))
    at = numpy.array([0.0, 0.05, 0.35, 0.85, 0.7] + [0.05 + 0.02 * n for n in range(spans - 5)])
    for rank in range(ranks):
        random = numpy.random.default_rng(rank)
        head = {"log": VERSION, "rank": rank, "world": ranks, "device": "cpu", "host": "here", "pid": 1}
        clock = 10**12
        lines: list[dict[str, Any]] = [head | {"unix": time.time() - steps * 0.05, "clock": clock}]
        for first in range(0, steps, 200):
            number = numpy.arange(first, min(first + 200, steps))
            begin = clock + number * 50_000_000
            late = random.exponential(1e6, (len(number), 1))
            start = begin[:, None] + (at * 50e6)[None, :] + late
            end = start + share * 50e6 * random.uniform(0.95, 1.0, (len(number), spans))
            end[:, 4] = begin + 0.85 * 50e6 + 4e6
            rows = numpy.zeros((len(number), spans, 6), numpy.int64)
            rows[:, :, 0] = numpy.arange(spans)
            rows[:, :, 1], rows[:, :, 2], rows[:, :, 3] = start, end, number[:, None] + 1
            rows[:, :, 5] = -1
            rows[:, 4, 4], rows[:, 4, 5] = 4_000_000, number
            line: dict[str, Any] = {"spans": len(number) * spans, "data": pack(rows.reshape(-1, 6))}
            lines.append(line | ({"names": kinds} if first == 0 else {}))
        lines.append({"end": clock + steps * 50_000_000, "status": "finished"})
        append_lines(span_log(folder, rank), lines)
    end_session(folder, "finished")


def long_report(steps: int) -> dict[str, Any]:
    """Seconds and memory of `meshwise report --json` on a run of `steps` steps, in a process of its own."""
    folder = Path(tempfile.mkdtemp())
    write_long_run(folder, steps)
    size = sum(path.stat().st_size for path in (folder / "spans").iterdir())
    command = [sys.executable, "-m", "meshwise", "report", str(folder), "--json"]
    began = time.perf_counter()
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    seconds = time.perf_counter() - began
    most = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024
    report = json.loads(done.stdout)
    assert report["steps"] == steps
    return {
        "steps": steps,
        "ranks": 4,
        "spans": sum(rank["spans"] for rank in report["ranks"]),
        "log_bytes": size,
        "seconds": seconds,
        "peak_bytes": most,
    }


def main() -> None:
    """Measure, print, keep."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=1500)
    parser.add_argument("--steps", type=int, default=100_000)
    asked = parser.parse_args()
    result: dict[str, Any] = {
        "claims": "at most 30 us and 1 % of a 5 ms step; 1 MB a minute; 100,000 steps in 10 s and 1 GB",
        "five spans a step": phases_alone(),
        "phases of nine microbatches": cost(asked.pairs, microbatches=9, samples=90),
        "report of a long run": long_report(asked.steps),
    }
    print(json.dumps(result, indent=2))
    keep("watching", result)


if __name__ == "__main__":
    main()
