"""What it costs a step to be watched: heartbeats, the comparison of replicas, and what a restart is kept ready with.

    python bench/bookkeeping.py [--pairs 3000]

One job on two CPU workers, in one run: steps with all of it and steps with none take turns, who goes first alternates,
and both do the same work on the same state. The comparison of replicas comes every 500 steps; it is timed by itself,
and its share of a step is added. The time of the main thread on its core is given beside the time that passed.

Claim: heartbeats, hashes and bookkeeping together cost a step of 5 ms or more at most 0.5 %.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from keep import keep
from overhead import compare as in_turns
from torch import nn

import meshwise as mw
from meshwise.engine.loops import LoopRead
from meshwise.engine.steps import batches as read_batches
from meshwise.job import loop
from meshwise.job.options import CHECK_EVERY, RunOptions
from meshwise.job.step import train_step
from meshwise.recording.recording import Recording
from meshwise.records import folder as names
from meshwise.records.files import write_text
from meshwise.spec.plan import Plan
from meshwise.timeline.recorder import current
from meshwise.tracking.metrics_log import MetricsLog
from meshwise.workers import heartbeat
from meshwise.workers.environment import KEPT
from meshwise.workers.join import join

WIDTH, SAMPLES = 256, 1 << 20


@dataclass
class Rows:
    """Random samples, as many as are asked for."""

    samples: int

    def __len__(self) -> int:
        return self.samples

    def batch(self, indices: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = (indices[:, None] % torch.arange(7, 7 + 32)).float() / 32
        return x, x.sum(1, keepdim=True)


def job_of(batch: int) -> mw.Job:
    """Batch norm, whose buffers are kept too; four hidden layers."""

    def model() -> nn.Module:
        layers = [nn.Linear(32, WIDTH), nn.BatchNorm1d(WIDTH), nn.ReLU()]
        for _ in range(3):
            layers += [nn.Linear(WIDTH, WIDTH), nn.ReLU()]
        return nn.Sequential(*layers, nn.Linear(WIDTH, 1))

    return mw.Job(
        name="bookkeeping",
        model=model,
        loss=lambda model, batch: nn.functional.mse_loss(model(batch[0]), batch[1]),
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-4),
        data=lambda: Rows(SAMPLES * batch),
        batch_size=batch,
        epochs=1,
    )


def sides(batch: int) -> tuple[Callable[[bool], None], Callable[[], None], Callable[[], None]]:
    """A step, watched or not; the comparison of replicas; the end."""
    session, folder = join(), Path(tempfile.mkdtemp()) / "run"
    folder.mkdir()
    (folder / "workers").mkdir()
    write_text(folder / names.RUN, "{}\n")
    (folder / "kept").touch()
    os.environ[KEPT] = str(folder / "kept")  # in a run its launcher holds that memory
    plan, job = Plan(data=session.world.size), job_of(batch)
    options = RunOptions(plan=plan, batch_size=batch)
    log = MetricsLog(folder, lambda *words, **facts: None, session.world, scaled=False)
    recording = Recording(session.world, folder)
    engine = loop.make_engine(session, plan)
    run = loop._prepare(job, options, folder, session, log, engine)
    run.state.model.train()
    batches = read_batches(engine, "a bench", loop._train_batches(run), batch, loop=LoopRead(step=run.state.step + 1))
    pulse, ledger, beat = current().pulse, log._ledger, heartbeat.beat
    assert pulse is not None and ledger is not None and run.last is not None, "nothing is kept here"

    def step(watched: bool) -> None:
        current().pulse, log._ledger, heartbeat.beat = (pulse, ledger, beat) if watched else (None, None, None)
        losses = train_step(engine, job, run.state, next(batches))
        log.pending.append((run.state.epoch, run.state.step, losses))
        if watched:
            run.clock.is_due(run.state.step)
            run.replicas.is_due(run.state.step)
            assert run.last is not None
            run.last.keep()
        if run.state.step % 100 == 0:
            log.sync()

    def compare() -> None:
        run.replicas._compared = -1  # else it knows that this step was compared
        run.replicas.compare(run.state)

    def end() -> None:
        heartbeat.beat = beat
        engine.close()
        recording.close()

    return step, compare, end


def measure(batch: int, pairs: int) -> dict[str, Any]:
    """Times of both kinds of steps, in pairs, on this rank."""
    step, compare, end = sides(batch)
    both = in_turns(lambda: step(True), lambda: step(False), pairs)
    compared = []
    for _ in range(20):
        began = time.perf_counter()
        compare()
        compared.append(time.perf_counter() - began)
    end()
    hashes = statistics.median(compared) / CHECK_EVERY
    share = hashes / both["by_hand_ms"] * 1e3
    return {
        "step_ms": both["by_hand_ms"],
        **{name: both[name] + share for name in ("ratio", "low", "high")},
        "hashes_us_a_step": hashes * 1e6,
        "main_thread_cpu_us": both["main_thread_cpu_beyond_us"],
        "pairs": pairs,
    }


def main() -> None:
    """Measure, print, keep."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--pairs", type=int, default=3000)
    parser.add_argument("--batches", type=int, nargs="*", default=[64, 512])
    given = parser.parse_args()
    result: dict[str, Any] = {"claim": " ".join((__doc__ or "").partition("Claim: ")[2].split()), "measured": {}}
    for batch in given.batches:
        (first, *_) = mw.launch(measure, batch, given.pairs if batch < 256 else given.pairs // 3, devices="2xcpu")
        result["measured"][f"batch {batch}"] = first
        print(
            f"batch {batch:5}  step {first['step_ms']:.2f} ms  ratio {first['ratio']:.4f} "
            f"[{first['low']:.4f}, {first['high']:.4f}]  of which hashes {first['hashes_us_a_step']:.1f} us a step; "
            f"main thread {first['main_thread_cpu_us']:+.1f} us",
            flush=True,
        )
    keep("bookkeeping", result)


if __name__ == "__main__":
    main()
