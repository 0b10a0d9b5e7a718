"""How soon a hang is told, whether a clean run is ever accused, and what the heartbeats cost.

    python bench/hangs.py [--clean 10000] [--pairs 1000]

told      a rank of two hangs or is stopped in some phase: seconds from the fault to the line that says so, and
          where the rank stands; three times the 99th percentile of a step, and 2 s, are waited for by design
clean     steps of a job on two workers beside two busy processes, with a rank stopped for 1 s every 15 s: lines that
          accuse somebody; the claim is none
cost      steps of 5 ms on two workers, with and without heartbeats in turn; and the beats of a step, counted, times the
          nanoseconds of a beat in a loop of its own: the claim is 0.5 % of a step at most
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from keep import keep, ratio_interval
from torch import nn

import meshwise as mw
from meshwise.machine.find import find_devices
from meshwise.recording.recording import Recording
from meshwise.spec.devices import parse_devices
from meshwise.timeline.recorder import current
from meshwise.workers import heartbeat
from meshwise.workers.heartbeat import Heartbeat, read_beats
from meshwise.workers.join import join
from meshwise.workers.launch import launch

SAMPLES, BATCH, STEP = 8000, 8, 0.005
FAULTS = [
    f"{kind}:rank=1,step=80,phase={phase}" for kind in ("hang", "stop") for phase in ("forward", "backward", "data")
]
RUN = [sys.executable, "-m", "meshwise", "run", f"{Path(__file__)}:job", "--devices", "2xcpu", "--log-every", "500"]
STOP_EVERY = 15.0


def loss(model: nn.Module, batch: Any) -> torch.Tensor:
    """About 5 ms of a step, most of it asleep, so that two cores carry two ranks."""
    time.sleep(STEP)
    return nn.functional.mse_loss(model(batch[0]), batch[1])


x = torch.randn(SAMPLES, 4, generator=torch.Generator().manual_seed(0))
job = mw.Job(
    name="clean",
    model=lambda: nn.Linear(4, 1),
    loss=loss,
    optimizer=lambda params: torch.optim.SGD(params, lr=0.01),
    data=lambda: (x, x.sum(1, keepdim=True)),
    batch_size=BATCH,
    epochs=1,
)


def told(fault: str) -> dict[str, Any]:
    """Seconds from the fault to the line about it."""
    with tempfile.TemporaryDirectory() as out:
        command = [*RUN, "--out", out, "--restarts", "0", "--hang-limit", "3s", "--fault", fault]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
            assert process.stdout is not None
            lines = [(time.time(), line) for line in process.stdout]
        (path,) = Path(out).glob("*/faults.jsonl")
        happened = json.loads(path.read_text().splitlines()[0])["time"]
    at, line = next((at, line) for at, line in lines if "No progress" in line)
    named = "rank 1 is in its phase" in line and ("stands at" in line or "is stopped" in line)
    return {"seconds": at - happened, "named": named, "line": line.strip(), "exit_code": process.returncode}


def clean(steps: int) -> dict[str, Any]:
    """Lines that accuse somebody in a run without faults, under load."""
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(2)]
    epochs, began, stops = -(-steps * BATCH // SAMPLES), time.time(), 0
    try:
        with tempfile.TemporaryDirectory() as out, (Path(out) / "log.txt").open("w+") as log:
            process = subprocess.Popen([*RUN, "--out", out, "--epochs", str(epochs)], stdout=log, stderr=log)
            while process.poll() is None:
                time.sleep(STOP_EVERY)
                if pid := a_worker(process.pid):
                    stops += stop_for_a_second(pid)
            log.seek(0)
            text = log.read()
    finally:
        for each in busy:
            each.kill()
            each.wait()
    accused = [line for line in text.splitlines() if "No progress" in line]
    if process.returncode:
        raise RuntimeError(f"the clean run ended with {process.returncode}:\n{text[-2000:]}")
    done = epochs * SAMPLES // BATCH
    return {"steps": done, "stops_of_1_s": stops, "accused": accused, "seconds": time.time() - began}


def a_worker(launcher: int) -> int | None:
    """A worker process of the launcher."""
    servers = Path(f"/proc/{launcher}/task/{launcher}/children")
    if not servers.exists():
        return None
    found = [
        Path(f"/proc/{server}/task/{server}/children").read_text().split() for server in servers.read_text().split()
    ]
    return next((int(pids[-1]) for pids in found if len(pids) > 1), None)


def stop_for_a_second(pid: int) -> bool:
    """Whether it could be stopped."""
    try:
        os.kill(pid, signal.SIGSTOP)
        time.sleep(1.0)
        os.kill(pid, signal.SIGCONT)
    except ProcessLookupError:
        return False
    return True


def alternated(pairs: int) -> tuple[list[float], list[float], int]:
    """In a worker: seconds of steps with heartbeats and without, in turn; and the beats of a step."""
    from overhead import our_step

    session = join()
    recording = Recording(session.world, None)
    beat, step = heartbeat.beat, our_step(job, recording.recorder)
    assert beat is not None
    for _ in range(20):
        step()
    before = beat.beats
    step()
    beats, seconds = beat.beats - before, {True: list[float](), False: list[float]()}
    for number in range(pairs):
        for on in (number % 2 == 0, number % 2 == 1):
            heartbeat.beat, current().pulse = (beat, beat) if on else (None, None)
            began = time.perf_counter()
            step()
            seconds[on].append(time.perf_counter() - began)
    return seconds[True], seconds[False], beats


def nanoseconds_of_a_beat() -> float:
    """The dearest of them in a loop of its own: a collective, come to and over, which is two."""
    with tempfile.TemporaryDirectory() as folder:
        beat = Heartbeat(Path(folder) / "beats")
        rounds = []
        for _ in range(20):
            began = time.thread_time_ns()  # of this thread alone: others may have the cores
            for _ in range(5000):
                beat.leave(beat.enter("all-reduce of gradients", "0,1/"))
            rounds.append((time.thread_time_ns() - began) / 10000)
        assert read_beats(Path(folder) / "beats") == 200_000
        return statistics.median(rounds)


def cost(pairs: int) -> dict[str, Any]:
    """Of the heartbeats in a step."""
    sys.path.insert(0, str(Path(__file__).parent))
    slots = find_devices(parse_devices("2xcpu"))
    on, off, beats = launch(alternated, (min(pairs, SAMPLES // BATCH // 2 - 15),), slots)[0]
    ratio, low, high = ratio_interval(on, off)
    beat = nanoseconds_of_a_beat()
    step = statistics.median(off)
    return {
        "pairs": len(on),
        "step_ms": step * 1e3,
        "with_over_without": {"ratio": ratio, "interval_95": [low, high]},
        "beats_a_step": beats,
        "nanoseconds_a_beat": beat,
        "percent_of_a_5_ms_step": beats * beat / 5e6 * 100,
    }


def main() -> None:
    """Measure, print, keep."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--clean", type=int, default=10_000)
    parser.add_argument("--pairs", type=int, default=1000)
    options = parser.parse_args()
    result: dict[str, Any] = {"load_before": os.getloadavg()[0], "cost": cost(options.pairs)}
    print(result["cost"], flush=True)
    result["told"] = {}
    for fault in FAULTS:
        result["told"][fault] = found = told(fault)
        print(f"{fault:40} {found['seconds']:.2f} s  {'named' if found['named'] else 'NOT NAMED'}", flush=True)
    result["clean"] = clean(options.clean)
    print(result["clean"], flush=True)
    keep("hangs", result)


if __name__ == "__main__":
    main()
