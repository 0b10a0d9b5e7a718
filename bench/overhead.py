"""What our step costs over a hand-written one: by turns in one process group.

    python bench/overhead.py [--seconds 20] [--turn 20] [--only WORD]

On one device against a plain loop, on two against a hand-written DistributedDataParallel loop. A job reads batches by
the slicing of the loop by hand; a script with the two lines reads the DataLoader that it has without them, with a
DistributedSampler. Who goes first alternates.
Rounds are added until no side of an interval is wider than 0.03, eight at most. What the last result has is kept.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import product, zip_longest
from pathlib import Path
from typing import Any

import torch
from keep import RESULTS, keep, ratio_interval
from torch.nn.parallel import DistributedDataParallel
from torch.optim import optimizer as torch_optimizer
from torch.utils.data import DataLoader, Dataset, DistributedSampler

import meshwise as mw
from meshwise.reports.recorder import Recorder
from meshwise.spec.plan import Plan
from meshwise.training.data.order import epoch_order, part
from meshwise.training.engine.loops import LoopRead
from meshwise.training.engine.steps import batches as read_batches
from meshwise.training.job import loop
from meshwise.training.job.job import Job
from meshwise.training.job.options import RunOptions
from meshwise.training.job.step import train_step
from meshwise.training.jobs.registry import find_job
from meshwise.training.recording.recording import Recording
from meshwise.training.tracking.metrics_log import MetricsLog
from meshwise.transfer import collectives
from meshwise.workers.join import join

Step = Callable[[], Any]
HOOKS = torch_optimizer._global_optimizer_pre_hooks, torch_optimizer._global_optimizer_post_hooks
WARM, ROUNDS, WIDEST = 20, 8, 0.03  # steps that are not timed; see compare


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


def hand_step(job: Job, read: Callable[[Job], Iterator[Any]] = slices, log_every: int = 100) -> Step:
    """The loop that a user writes by hand, with DistributedDataParallel on several ranks. log_every: steps between two
    looks at the loss; 0: none."""
    torch.manual_seed(0)
    model: Any = job.model().to(join().world.device)
    if join().world.size > 1:
        model = DistributedDataParallel(model)
    optimizer = job.optimizer(model.parameters())
    batches, count = read(job), {"steps": 0}

    def by_hand() -> None:
        batch = next(batches)
        optimizer.zero_grad()
        loss = job.loss(model, batch)
        loss = loss[0] if isinstance(loss, tuple) else loss
        loss.backward()
        if job.clip_norm:
            torch.nn.utils.clip_grad_norm_(model.parameters(), job.clip_norm)
        optimizer.step()
        count["steps"] += 1
        if log_every and count["steps"] % log_every == 0:
            loss.item()

    return by_hand


class _Rows(Dataset[Any]):
    """The job's data set, for a DataLoader, which asks it for the rows of a batch at once."""

    def __init__(self, data: Any) -> None:
        self.data = data

    def __len__(self) -> int:
        return len(self.data)

    def __getitems__(self, indices: list[int]) -> Any:
        return self.data.batch(torch.tensor(indices))


class _Samples(Dataset[Any]):
    """As most scripts have it: one sample at a time, from tensors in memory."""

    def __init__(self, data: Any) -> None:
        self.length, self.kept = len(data), data.batch(torch.arange(4096))

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Any:
        return tuple(tensor[index % 4096] for tensor in self.kept)


def _as_read(batch: Any) -> Any:
    return batch


COLLATE: dict[Any, Any] = {_Rows: _as_read, _Samples: None}


def loaded(job: Job, kind: Callable[[Any], Any] = _Rows) -> Iterator[Any]:
    """As `slices`, by the DataLoader that the script of `two_lines_step` has before them, with a DistributedSampler."""
    world, rows = join().world, kind(job.data())
    sampler = DistributedSampler(rows, world.size, world.rank)
    for batch in DataLoader(rows, job.batch_size // world.size, sampler=sampler, collate_fn=COLLATE[kind]):
        yield tuple(tensor.to(world.device) for tensor in batch)


def two_lines_step(job: Job, kind: Callable[[Any], Any] = _Rows) -> Step:
    """A loop of one's own with mw.distribute and mw.backward."""
    torch.manual_seed(0)
    model = job.model().to(join().world.device)
    loader = DataLoader(kind(job.data()), batch_size=job.batch_size, shuffle=True, collate_fn=COLLATE[kind])
    model, optimizer, loader = mw.distribute(model, job.optimizer(model.parameters()), loader, view="rank")
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


def compare(ours: Step, theirs: Step, steps: int, rounds: int = 1, turn: int = 1) -> dict[str, Any]:
    """Times of both by turns of so many steps, of which the median counts, who goes first alternating; up to `rounds`
    times `steps`, while the interval of their ratio is wider than WIDEST on a rank."""
    times: tuple[list[float], list[float]] = ([], [])
    cpu: tuple[list[float], list[float]] = ([], [])  # of the main thread
    known = [hooks.copy() for hooks in HOOKS]
    turns = max(steps // turn, 1)
    for number in range(turns * rounds + 1):
        if number > 1 and (number - 1) % turns == 0 and not _too_wide(*ratio_interval(*times)):
            break
        for side in (0, 1) if number % 2 else (1, 0):
            step = (ours, theirs)[side]
            _hook([] if step.__name__ == "by_hand" else known)
            took = []
            for _ in range(turn if number else WARM):
                start, before = time.perf_counter(), time.thread_time()
                step()
                took.append((time.perf_counter() - start, time.thread_time() - before))
            if number:
                for kept, figures in zip((times, cpu), zip(*took, strict=True), strict=True):
                    kept[side].append(statistics.median(figures))
    _hook(known)
    ratio, low, high = ratio_interval(*times)
    ms = [statistics.median(side) * 1e3 for side in times]
    beyond = (statistics.median(cpu[0]) - statistics.median(cpu[1])) * 1e6
    facts = {"ratio": ratio, "low": low, "high": high, "ours_ms": ms[0], "by_hand_ms": ms[1]}
    facts["steps"] = turn * len(times[0])
    return {**facts, "main_thread_cpu_beyond_us": round(beyond, 1)}


def _hook(known: Sequence[Mapping[int, Any]]) -> None:
    """Our hooks of every optimizer, or none: a program by hand would not have them."""
    for hooks, kept in zip_longest(HOOKS, known, fillvalue={}):
        hooks.clear()
        hooks.update(kept)


def _too_wide(ratio: float, low: float, high: float) -> bool:
    wide = torch.tensor([max(ratio - low, high - ratio) > WIDEST], dtype=torch.float32)
    if join().world.size > 1:
        wide = collectives.all_reduce(wide, "max")
    return bool(wide)


def measure(name: str, batch_size: int | None, steps: int, rounds: int = 1, turn: int = 1) -> dict[str, Any]:
    """Job step, two lines, and the hand-written loop against itself, on this rank."""
    job = find_job(name)
    job = replace(job, batch_size=batch_size or job.batch_size, scheduler=None)
    data = job.data()
    needed = (steps * rounds + WARM) * job.batch_size
    job = replace(job, data=lambda: _Repeated(data, needed))
    recording = Recording(join().world, Path(tempfile.mkdtemp()))  # as in a run: spans are written beside
    ours = compare(our_step(job, recording.recorder), hand_step(job), steps, rounds, turn)
    recording.close()
    return {
        "job": ours,
        "two lines": compare(two_lines_step(job), hand_step(job, loaded, 0), steps, rounds, turn),
        "two lines, sample by sample": compare(
            two_lines_step(job, _Samples), hand_step(job, partial(loaded, kind=_Samples), 0), steps, rounds, turn
        ),
        "by hand against itself": compare(hand_step(job), hand_step(job), steps, rounds, turn),
    }


class _Repeated(Dataset[Any]):
    """A data set repeated until it has enough samples for all steps."""

    def __init__(self, data: Any, samples: int) -> None:
        self.data, self.samples = data, samples

    def __len__(self) -> int:
        return self.samples

    def batch(self, indices: torch.Tensor) -> Any:
        return self.data.batch(indices % len(self.data))


ROWS = {("mnist-mlp", None): 2e-3, ("mnist-cnn", 208): 29e-3, ("mnist-cnn", 2560): 0.51}
"""Job and batch, and about how many seconds a step takes on two cores."""


def main() -> None:
    """Measure, print, keep."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=20.0, help="of a round")
    parser.add_argument("--turn", type=int, default=20, help="steps of one before the other's: a program has one loop")
    parser.add_argument("--only", default="", help="rows with this word")
    options = parser.parse_args()
    kept = RESULTS / "overhead.json"
    result: dict[str, Any] = {"measured": json.loads(kept.read_text())["measured"] if kept.exists() else {}}
    for devices, ((name, batch_size), seconds) in product(("1xcpu", "2xcpu"), ROWS.items()):
        row = f"{name}{f' batch {batch_size}' if batch_size else ''}, {devices}"
        if options.only not in row:
            continue
        steps = max(int(options.seconds / seconds / 2), 20)
        turn = min(options.turn, max(steps // 20, 1))
        (first, *_) = mw.launch(measure, name, batch_size, steps, ROUNDS, turn, devices=devices)
        for what, figures in first.items():
            result["measured"][f"{row}, {what}"] = figures
            print(
                f"{f'{row}, {what}':52}  {figures['ratio']:.3f}  [{figures['low']:.3f}, {figures['high']:.3f}]  "
                f"{figures['ours_ms']:.2f} ms against {figures['by_hand_ms']:.2f} ms, "
                f"{figures['main_thread_cpu_beyond_us']:+.0f} us of the main thread, {figures['steps']} steps",
                flush=True,
            )
        keep("overhead", result)


if __name__ == "__main__":
    main()
