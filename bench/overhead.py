"""What our step costs over a hand-written one: interleaved step by step in one process group.

    python bench/overhead.py [--steps 400]

On one device against a plain loop, on two against a hand-written DistributedDataParallel loop; the job's own step, and
the two lines in a loop of one's own. Both sides read the same batches by the same slicing; who goes first alternates.
The claim of the project is made for steps of 5 ms or more; shorter ones are shown beside it.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from keep import keep, ratio_interval
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

import meshwise as mw
from meshwise.data.order import epoch_order, part
from meshwise.engine.loops import LoopRead
from meshwise.engine.steps import batches as read_batches
from meshwise.job import loop
from meshwise.job.job import Job
from meshwise.job.options import RunOptions
from meshwise.job.step import train_step
from meshwise.jobs.registry import find_job
from meshwise.recording.recording import Recording
from meshwise.spec.plan import Plan
from meshwise.timeline.recorder import Recorder
from meshwise.tracking.metrics_log import MetricsLog
from meshwise.workers.join import join

Step = Callable[[], Any]


def our_step(job: Job, recorder: Recorder, log_every: int = 100) -> Step:
    """One turn of our loop: gate, data, step, losses noted; read and written down every `log_every` steps."""
    session = join()
    log = MetricsLog(None, None, session.world, scaled=False)
    plan = Plan(data=session.world.size)
    options = RunOptions(plan=plan, log_every=log_every)
    engine = loop.make_engine(session, plan)
    run = loop._prepare(job, options, None, session, log, engine)
    state = run.state
    batches = read_batches(
        engine, "a bench", loop._train_batches(run), job.batch_size, loop=LoopRead(step=state.step + 1)
    )

    def step() -> None:
        losses = train_step(engine, job, state, next(batches))
        log.pending.append((0, state.step, losses))
        if state.step % log_every == 0:
            log.sync()

    return step


def slices(job: Job) -> Iterator[Any]:
    """This rank's part of each batch on its device, by hand."""
    world = join().world
    data = job.data()
    order = epoch_order(0, 0, len(data))
    for start in range(0, len(order), job.batch_size):
        first, last = part(start, min(start + job.batch_size, len(order)), world.size, world.rank)
        yield tuple(tensor.to(world.device) for tensor in data.batch(order[first:last]))


def hand_step(job: Job, log_every: int = 100) -> Step:
    """The loop that a user writes by hand, with DistributedDataParallel on several ranks."""
    torch.manual_seed(0)
    model: Any = job.model().to(join().world.device)
    if join().world.size > 1:
        model = DistributedDataParallel(model)
    optimizer = job.optimizer(model.parameters())
    batches, count = slices(job), {"steps": 0}

    def step() -> None:
        batch = next(batches)
        optimizer.zero_grad()
        loss = job.loss(model, batch)
        loss = loss[0] if isinstance(loss, tuple) else loss
        loss.backward()
        if job.clip_norm:
            torch.nn.utils.clip_grad_norm_(model.parameters(), job.clip_norm)
        optimizer.step()
        count["steps"] += 1
        if count["steps"] % log_every == 0:
            loss.item()

    return step


class _Rows(Dataset[Any]):
    """The job's data set, for a DataLoader that mw.distribute takes over."""

    def __init__(self, data: Any) -> None:
        self.data, self.batch = data, data.batch

    def __len__(self) -> int:
        return len(self.data)


def two_lines_step(job: Job) -> Step:
    """A loop of one's own with mw.distribute and mw.backward."""
    torch.manual_seed(0)
    model = job.model().to(join().world.device)
    loader = DataLoader(_Rows(job.data()), batch_size=job.batch_size, shuffle=True)
    model, optimizer, loader = mw.distribute(model, job.optimizer(model.parameters()), loader)
    batches, device = iter(loader), join().world.device

    def step() -> None:
        batch = tuple(tensor.to(device) for tensor in next(batches))
        loss = job.loss(model, batch)
        if isinstance(loss, tuple):
            mw.backward(loss[0], weight=loss[1])
        else:
            mw.backward(loss)
        if job.clip_norm:
            torch.nn.utils.clip_grad_norm_(model.parameters(), job.clip_norm)
        optimizer.step()
        optimizer.zero_grad()

    return step


def compare(ours: Step, theirs: Step, steps: int) -> dict[str, Any]:
    """Interleaved times of both, who goes first alternating."""
    times: tuple[list[float], list[float]] = ([], [])
    cpu: tuple[list[float], list[float]] = ([], [])  # of the main thread
    for number in range(steps + 20):
        for side in (0, 1) if number % 2 else (1, 0):
            start, before = time.perf_counter(), time.thread_time()
            (ours, theirs)[side]()
            if number >= 20:
                times[side].append(time.perf_counter() - start)
                cpu[side].append(time.thread_time() - before)
    ratio, low, high = ratio_interval(*times)
    ms = [statistics.median(side) * 1e3 for side in times]
    beyond = (statistics.median(cpu[0]) - statistics.median(cpu[1])) * 1e6
    facts = {"ratio": ratio, "low": low, "high": high, "ours_ms": ms[0], "by_hand_ms": ms[1], "steps": steps}
    return {**facts, "main_thread_cpu_beyond_us": round(beyond, 1)}


def measure(name: str, batch_size: int | None, steps: int) -> dict[str, Any]:
    """Job step, two lines, and the hand-written loop against itself, on this rank."""
    job = find_job(name)
    job = replace(job, batch_size=batch_size or job.batch_size, scheduler=None)
    data = job.data()
    needed = (steps + 20) * job.batch_size
    job = replace(job, data=lambda: _Repeated(data, needed))
    recording = Recording(join().world, Path(tempfile.mkdtemp()))  # as in a run: spans are written beside
    ours = compare(our_step(job, recording.recorder), hand_step(job), steps)
    recording.close()
    return {
        "job": ours,
        "two lines": compare(two_lines_step(job), hand_step(job), steps),
        "by hand against itself": compare(hand_step(job), hand_step(job), steps),
    }


class _Repeated(Dataset[Any]):
    """A data set repeated until it has enough samples for all steps."""

    def __init__(self, data: Any, samples: int) -> None:
        self.data, self.samples = data, samples

    def __len__(self) -> int:
        return self.samples

    def batch(self, indices: torch.Tensor) -> Any:
        return self.data.batch(indices % len(self.data))


def main() -> None:
    """Measure, print, keep."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=400)
    steps = parser.parse_args().steps
    result: dict[str, Any] = {"claims": {"1xcpu": "ratio <= 1.03", "2xcpu": "ratio <= 1.02"}, "measured": {}}
    for devices in ("1xcpu", "2xcpu"):
        for name, batch_size in (("mnist-cnn", None), ("mnist-mlp", None), ("mnist-mlp", 1024)):
            (first, *_) = mw.launch(measure, name, batch_size, steps, devices=devices)
            for what, figures in first.items():
                key = f"{name}{f' batch {batch_size}' if batch_size else ''}, {devices}, {what}"
                result["measured"][key] = figures
                print(
                    f"{key:48}  {figures['ratio']:.3f}  [{figures['low']:.3f}, {figures['high']:.3f}]  "
                    f"{figures['ours_ms']:.2f} ms against {figures['by_hand_ms']:.2f} ms, "
                    f"{figures['main_thread_cpu_beyond_us']:+.0f} us of the main thread",
                    flush=True,
                )
    keep("overhead", result)


if __name__ == "__main__":
    main()
