"""Define a training loop's step: its batch, backward and optimizer.

    batch       is requested from the loader, and yielded while all ranks continue
    forward     is run by the program, on this rank's part of the batch
    weigh       turns the mean over this rank's samples into its share of the mean over the batch
    backward    averages gradients over the ranks while it runs, or afterwards if they fit in one bucket
                (parallel/data.py); the loss is sent along, or has its own sum over ranks (under shard, or with a
                weight)
    optimizer   is stepped by the program: every rank makes the same step

A job runs the forwards and backwards of its microbatches itself (training/job/step.py).
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Generator, Iterator
from typing import TypeVar

import torch
from torch import Tensor
from torch.optim import Optimizer

from meshwise.parallel.step_hooks import Order, is_by_numbers, subscribe
from meshwise.torch_compat import program_calls
from meshwise.torch_compat.compiling import pass_by
from meshwise.torch_compat.loss_scale import SCALED, unscaled
from meshwise.torch_compat.program_calls import WATCHING
from meshwise.training.data.order import BatchSlice
from meshwise.training.engine.engine import Engine
from meshwise.training.engine.loops import LoopRead
from meshwise.training.engine.program import Program
from meshwise.training.engine.weighing import (
    StepWeights,
    check_said,
    mean_of_sum,
    refuse_joined_sum,
    refuse_loss,
    unpadded,
)
from meshwise.transfer.reading import look_out, meet
from meshwise.workers.verb_log import in_progress, log_verb

Batch = TypeVar("Batch")
AS_WRITTEN = [
    *(f"meshwise.training.{room}" for room in ("autograd", "data", "engine", "guards", "job", "process", "recording")),
    *(f"meshwise.{name}" for name in ("training.script", "training.slips", "training.tracking", "torch_compat")),
    *(f"meshwise.{name}" for name in ("transfer", "reports", "workers", "parallel.data", "parallel.step_hooks")),
]
"""Modules that torch.compile must not trace if a program compiles a function with a whole step."""
ALONE = (
    "{here}: rank {rank} reads a gradient that mw.accumulate() has not added up over the ranks yet, and {other}. All "
    "ranks must read this gradient together. Read it outside of code that only some ranks run, or run the last batch "
    "before it outside of mw.accumulate()."
)


def batches(
    engine: Engine,
    name: str,
    source: Iterator[Batch],
    size: int,
    *,
    limited: Callable[[int], Iterator[Batch]] | None = None,
    loop: LoopRead | None = None,
) -> Generator[Batch, None, None]:
    """Yield batches from `source` while all ranks continue."""
    now = loop or LoopRead()
    pass_by(AS_WRITTEN)  # AS_WRITTEN omits the code that models' hooks call, which is compiled with the models
    if engine.script and engine.world.size > 1 and engine.reads.is_elsewhere(now):
        engine.events.begins()
    heard = engine.events.of_loop(0)
    with engine.generator.loop():
        in_progress.add(name)
        engine.stopped = False
        try:
            while True:
                if now.given >= heard.due or heard.state is not engine.events.state:
                    heard = engine.events.of_loop(now.given)
                for hear in heard.asked:
                    hear(now)
                if engine.watcher is not None and limited is not None:
                    limit = engine.watcher.batch_limit(size)
                    source = source if limit is None else limited(limit)
                batch = next(source, None)
                if batch is None:
                    break
                if not engine.gate.begin() and not engine.given.finishes_epoch():
                    engine.stopped = True
                    break
                now.given += 1
                for hear in heard.given:
                    hear(now, batch)
                yield batch
            now.over = True
        finally:
            for hear in engine.events.loop_ends:
                hear(now)
            engine.part = engine.reads.end(now) if engine.script else None
            in_progress.discard(name)


def backward(
    engine: Engine, loss: Tensor, weight: Tensor | float | None = None, reduction: str | None = None
) -> Tensor:
    """Add to `.grad` what one device would add for the whole batch, and return the global loss. See `mw.backward`."""
    if reduction is not None:
        check_said(reduction, weight)
    part, before, events = engine.part, unscaled(loss) if SCALED else loss, engine.events
    for hear in events.backward_begins:
        hear(before, part, weight, reduction, "")
    engine.program.begin_backward()
    mean, summed = None, reduction == "sum"
    try:
        if engine.watcher is None and engine.reduce and not WATCHING:
            mean = _run_backward(engine, loss, before, weight, part, summed)
        else:
            with watched(engine):
                mean = _run_backward(engine, loss, before, weight, part, summed)
    finally:
        for hear in events.backward_ends:
            hear(mean, before)
    engine.reads.backward(weighed=summed or weight is not None)
    if engine.program.backwards >= events.due:
        events.tell()
    if engine.watcher is not None:
        engine.watcher.loss_known(mean)
    return mean


def _run_backward(
    engine: Engine, loss: Tensor, before: Tensor, weight: Tensor | float | None, part: BatchSlice | None, summed: bool
) -> Tensor:
    """Run the backward of this rank's loss, and return the loss of the global batch."""
    reduction, reads = engine.program.reduction, engine.reads
    if reduction is None:
        return _alone(engine.program, loss, before)
    if len(reads.round) > 1 or (reads.round and reads.round[0].earlier is not None):
        reads.check_one_share("mw.backward", weighed=summed or weight is not None)
    if part is None or loss.numel() != 1:
        refuse_loss(loss, part)
    own = reduction.plain(loss)
    before = own if before is loss else reduction.plain(before.detach())
    if summed:
        if engine.program.joined_at == engine.program.backwards - 1:
            refuse_joined_sum()
        own, before = (mean_of_sum(each, part, part.total) for each in (own, before))
    if weight is not None:
        return _weighted(engine, own, before, weight, part)
    ratio, own, seen = part.ratio(engine.world.size), own.reshape(()) if own.ndim else own, before.detach().reshape(1)
    scaled, value = (own, seen) if ratio == 1 else (own * ratio, seen * ratio)
    signs = engine.carried.signs(value)
    value = torch.cat([value if value.dtype is signs.dtype else value.to(signs), signs])
    means = reduction.backward(scaled, reduce=engine.reduce, value=value)
    assert means is not None
    engine.carried.compare(means, (engine.program.backwards, engine.phases.number, part, seen))
    return means[0] if means.dtype is before.dtype else means[0].to(before.dtype)


def _weighted(engine: Engine, own: Tensor, before: Tensor, weight: Tensor | float, part: BatchSlice) -> Tensor:
    """Run the backward of a loss that is a mean over items such as tokens, and return the global loss. weight: the
    number of this rank's items. The ranks add up their weights while the backward runs."""
    program, weights = engine.program, StepWeights(engine.world.size, engine.program.coupled_gradients)
    assert program.reduction is not None
    value, _ = unpadded(before.reshape(()), weight, part.samples)
    scaled = weights.scale(*unpadded(own.reshape(()), weight, part.samples), part, before=value)
    factor = weights.begin_sum(engine.carried.signs(scaled))
    program.reduction.backward(scaled, reduce=engine.reduce, factor=factor)
    engine.carried.compare(weights.means(), (program.backwards, engine.phases.number, part, weights.losses[-1][0]))
    return weights.global_mean().to(own.dtype)


def _alone(program: Program, loss: Tensor, before: Tensor) -> Tensor:
    """Run the backward on one device, without reducing gradients. Raise UsageError on several ranks."""
    program.check_has_models()
    program.plain(loss).backward()
    return program.plain(before.detach())  # type: ignore[no-any-return]


def watched(engine: Engine) -> contextlib.AbstractContextManager[None]:
    """Return a context manager for a backward that reduces gradients, or for one that leaves them unreduced."""
    watch = engine.watched_backward(engine.reduce)
    return watch if engine.reduce and not WATCHING else _keeping(engine.program, engine.reduce, watch)


@contextlib.contextmanager
def _keeping(program: Program, reduce: bool, watched: contextlib.AbstractContextManager[None]) -> Iterator[None]:
    """Return a context manager for a backward under `mw.accumulate`, or for the first backward after it. Under
    `mw.accumulate`, gradients stay on their rank."""
    program_calls.leave_gradients()
    with watched:
        yield
    if program.reduction is not None and not reduce:
        look_out()
        program_calls.watch_gradients(functools.partial(_read, program))


def _read(program: Program, p: Tensor) -> None:
    reduction = program.reduction
    if reduction is None or not reduction.unreduced:
        program_calls.leave_gradients()
    elif any(p is own for own in program.named_parameters().values()):
        meet("a gradient", ALONE)
        program_calls.leave_gradients()
        # The gradient may be read without grad mode, for example by `clip_grad_norm_`.
        with torch.inference_mode(False), torch.enable_grad():
            reduction.reduce_now()


def follow_optimizers(engine: Engine) -> None:
    """From now on, check each step of the program's optimizers."""
    program, events, stepping = engine.program, engine.events, set[int]()  # ids of the optimizers that are in a step

    def begins(optimizer: Optimizer, *_: object) -> None:
        stepping.discard(id(optimizer))
        if not program.check_step(optimizer):
            return
        stepping.add(id(optimizer))
        if engine.script:
            log_verb("optimizer.step")
        if program.may_draw and not is_by_numbers(optimizer):
            engine.step_draws.begins(engine.draw_key)
        for hear in events.step_begins:
            hear(optimizer)

    def ends(optimizer: Optimizer) -> None:
        if id(optimizer) not in stepping:
            return
        for hear in events.step_ends:
            hear(optimizer)
        if program.may_draw:
            engine.step_draws.ends()

    engine.ends.callback(subscribe(Order.GUARD, begins, ends).remove)
