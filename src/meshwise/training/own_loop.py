"""For people who keep their own loop: `distribute` and `backward`, and what goes with them.

    model, optimizer, loader = mw.distribute(model, optimizer, loader)
    for x, y in loader:
        loss = criterion(model(x), y)
        mw.backward(loss)
        optimizer.step(); optimizer.zero_grad()

The objects that come back are the objects that were given; only loaders are new. On one device `backward` is
`loss.backward()`. On several it leaves in `.grad` what one device would have added for the whole batch.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader

from meshwise.parallel.apply import Applied
from meshwise.spec.errors import UsageError
from meshwise.spec.plan import Plan
from meshwise.spec.world import World
from meshwise.training.draws import mixed, seed_draws
from meshwise.training.own_laid import cast, lay_models, lay_optimizer
from meshwise.training.own_loader import LoaderSpec, split_loader
from meshwise.training.own_plan import settle
from meshwise.training.own_state import own as _own
from meshwise.training.own_state import say
from meshwise.training.recording import record_script
from meshwise.training.weighing import as_weight, zero_if_empty
from meshwise.transfer import collectives
from meshwise.transfer.prefetch import prefetch
from meshwise.workers.join import join, rank_context
from meshwise.workers.worker import in_progress

Number = TypeVar("Number", int, float, Tensor)


def distribute(*objects: Any, plan: Plan | str | Path | None = None, streams: str = "whole") -> Any:
    """Lay models, optimizers and loaders on all devices; gives them back in the same order (one object, as itself).

    Models and optimizers are changed in place: class, hooks and state_dict keys stay; start values are those of rank 0.
    Loaders are new, with the same `len`; their `batch_size` is global. Schedulers pass through. On one device only the
    loaders are replaced, so that the data order is the same for any number of devices.

    plan: a Plan or a plan file; by default that of `meshwise run --plan` or of the file that MESHWISE_PLAN names, else
    replicas. Optimizers made before go on with what it makes of the parameters.
    streams: how an iterable data set is shared out: `whole` (every rank reads it all and keeps its share) or `per-rank`
    (the data set splits itself by `mw.rank()`). Raises UsageError for anything else that is given, PlanError for a plan
    that cannot be carried out.
    """
    world = join().world
    if _own.recording is None:
        _own.recording = record_script(world, foreign=rank_context().channel is None, say=say)
    models = [thing for thing in objects if isinstance(thing, nn.Module)]
    if models or plan is not None:
        lay_models(models, settle(plan, world), world)
    seed = int(collectives.broadcast_object(torch.initial_seed())) % 2**31
    result = tuple(_distributed(thing, seed, world, streams) for thing in objects)
    return result[0] if len(result) == 1 else result


def _distributed(thing: Any, seed: int, world: World, streams: str) -> Any:
    if isinstance(thing, (nn.Module, LRScheduler)):
        return thing
    if isinstance(thing, Optimizer):
        lay_optimizer(thing, world)
        if _own.recording is not None:
            _own.spans.optimizers = True
            thing.register_step_pre_hook(lambda *_: _own.spans.optimizer_begins())
            thing.register_step_post_hook(lambda *_: _own.spans.optimizer_ends())
        return thing
    if isinstance(thing, DistributedLoader):
        return thing
    if isinstance(thing, DataLoader):
        plain = split_loader(
            thing, seed if thing.generator is None else thing.generator.initial_seed() % 2**31, world, streams
        )
        if plain.note:
            say(plain.note)
        return DistributedLoader(thing, plain, seed, world)
    raise UsageError(
        f"mw.distribute takes models, optimizers, schedulers and DataLoaders; this is a {type(thing).__name__}."
    )


class DistributedLoader:
    """Gives this rank its share of every batch of the user's loader; `len`, `dataset`, `batch_size` are the user's."""

    def __init__(self, loader: DataLoader[Any], plain: LoaderSpec, seed: int, world: World) -> None:
        self.dataset, self.batch_size = loader.dataset, plain.batch_size
        self._plain, self._seed, self._world = plain, seed, world
        self._epoch, self._index, self._running = 0, 0, False

    def __len__(self) -> int:
        if self._plain.length is None:
            raise TypeError("this loader's length is not known: its data set or sampler has none")
        return self._plain.length

    def state_dict(self) -> dict[str, int]:
        """Where the loader is: the epoch, and how many samples of it have been given out.

        Any number of devices goes on from it.
        """
        return {"epoch": self._epoch, "index": self._index}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Go on from `state` with the next loop over this loader."""
        self._epoch, self._index = int(state["epoch"]), int(state["index"])
        self._running = False

    def __iter__(self) -> Iterator[Any]:
        if self._running:  # the loop before this one was left early: its epoch is over
            self._epoch, self._index = self._epoch + 1, 0
        self._running = True
        gate = rank_context().gate
        outer = torch.get_rng_state()
        name = f"epoch {self._epoch} of a loader"
        in_progress.add(name)
        _own.used_stand_ins = False
        if _own.observer is not None:
            _own.observer.begins()
        try:
            pairs = prefetch(self._plain.pairs(self._epoch, self._index), _device())
            while True:
                _own.spans.asked()
                if _own.observer is not None:
                    _own.observer.asked()
                    most = _own.observer.most(self.batch_size)
                    pairs = pairs if most is None else self._shortened(most)
                pair = next(pairs, None)
                if pair is None:
                    break
                batch, share = pair
                if not gate.begin():
                    raise KeyboardInterrupt("the run was asked to stop; every rank stops before the same batch")
                _own.share = share
                _own.used_stand_ins |= share.total < self._world.size
                seed_draws(mixed(self._seed, self._epoch), self._index, self._world)
                self._index += share.total
                _own.spans.given()
                batch = cast(batch)
                if _own.observer is not None:
                    _own.observer.given(share)
                yield batch
            self._epoch, self._index, self._running = self._epoch + 1, 0, False
        finally:
            if _own.observer is not None:
                _own.observer.left()
            _own.share = None
            in_progress.discard(name)
            torch.set_rng_state(outer)

    def _shortened(self, most: int) -> Iterator[Any]:
        """One batch more, of at most so many samples."""
        return prefetch(self._plain.pairs(self._epoch, self._index, most), _device()) if most else iter(())


def _device() -> str:
    first = next(_own.models.parameters(), None)
    return "cpu" if first is None else str(first.device)


def backward(loss: Tensor, weight: Tensor | float | None = None) -> Tensor:
    """Add to `.grad` what one device would add for the whole batch of the loader; returns the global loss, detached.

    loss: a scalar mean over `weight` items of this rank's share; by default over its samples, which the loader knows. A
    token mean passes its number of tokens. Collective: every rank calls it once a batch.
    """
    _own.backwards += 1
    _own.stepped.clear()
    _own.stepping.clear()
    watched = contextlib.nullcontext() if _own.observer is None else _own.observer.backward(_own.reduce)
    with watched, _own.spans.backward(_own.share.total if _own.share is not None else 0):
        mean = _backward(loss, weight)
    _own.spans.loss(mean)
    if _own.observer is not None:
        _own.observer.lost(mean)
    return mean


def _backward(loss: Tensor, weight: Tensor | float | None) -> Tensor:
    applied, share = _own.applied, _own.share
    if applied is None or applied.reduction is None:
        loss.backward()
        return loss.detach()
    if share is None:
        raise UsageError(
            "mw.backward was called outside a loop over a distributed loader, so the size of the batch is not known. "
            "Give the loader to mw.distribute too, and call mw.backward inside its loop."
        )
    if loss.numel() != 1:
        raise UsageError(f"mw.backward needs one number; this loss has shape {tuple(loss.shape)}. Take its mean first.")
    if weight is None:
        scaled = loss.reshape(()) * (share.samples * collectives.world_size() / share.total)
        mean = applied.backward(scaled, reduce=_own.reduce, value=scaled.detach())
        assert mean is not None
        return mean
    return _weighted_backward(applied, loss, as_weight(weight if share.samples else weight * 0, loss))


def _weighted_backward(applied: Applied, loss: Tensor, weight: Tensor) -> Tensor:
    """The weights' sum is reduced while the backward runs, and divides the gradients before they are averaged."""
    loss = zero_if_empty(loss.reshape(()), weight)
    wait = collectives.begin_sum(torch.stack([loss.detach().to(weight.dtype) * weight, weight])).wait
    scaled, left = (loss * weight.to(loss.dtype), 1.0) if applied.meets else (loss, weight)
    applied.backward(scaled, reduce=_own.reduce, factor=lambda: left * collectives.world_size() / wait()[1])
    total, weights = wait().unbind()
    return (total / weights).to(loss.dtype)


@contextlib.contextmanager
def accumulate() -> Iterator[None]:
    """`mw.backward` inside keeps its gradients on their rank; the next outside, or `optimizer.step`, reduces all."""
    before, _own.reduce = _own.reduce, False
    try:
        yield
    finally:
        _own.reduce = before


def sum(value: Number) -> Number:
    """`value` added over all ranks, stand-ins left out: the one extra line of an evaluation. Collective.

    Call it inside the loop over the loader. A number comes back as a number, a tensor as a tensor.
    """
    total = _sum(value, join().world)
    if _own.observer is not None:
        _own.observer.summed(total)
    return total


def _sum(value: Number, world: World) -> Number:
    if world.size == 1:
        return value
    if _own.share is None and _own.used_stand_ins:
        raise UsageError(
            f"mw.sum was called after a loop whose last batch had fewer samples than the {world.size} ranks: "
            "some rank's value counts a repeated sample. Call mw.sum inside the loop, on each batch's value."
        )
    counts = 0 if _own.share is not None and _own.share.samples == 0 else 1
    if isinstance(value, Tensor):
        return collectives.all_reduce(value.detach().clone() * counts)
    dtype = torch.int64 if isinstance(value, int) else torch.float64
    total = collectives.all_reduce(torch.tensor(value, dtype=dtype) * counts)
    return type(value)(total.item())


def rank() -> int:
    """This process's rank, from 0."""
    return rank_context().world.rank


def world_size() -> int:
    """How many ranks the run has."""
    return rank_context().world.size
