"""For people who keep their own training loop: `distribute` and `backward`, and what goes with them.

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
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader

from meshwise.spec.errors import UsageError
from meshwise.spec.plan import Plan
from meshwise.training.engine import Engine, Number
from meshwise.training.plan_choice import choose_plan
from meshwise.training.session import default_engine
from meshwise.training.split_loader import LoaderSpec, split_loader
from meshwise.transfer import collectives
from meshwise.transfer.prefetch import prefetch
from meshwise.transfer.splitmix import mixed
from meshwise.workers.join import rank_context


def distribute(*objects: Any, plan: Plan | str | Path | None = None, streams: str = "whole") -> Any:
    """Put models, optimizers and loaders on all devices; gives them back in the same order (one object, as itself).

    Models and optimizers are changed in place: class, hooks and state_dict keys stay; start values are those of rank 0.
    Loaders are new, with the same `len`; their `batch_size` is global. Schedulers pass through. On one device only the
    loaders are replaced, so that the data order is the same for any number of devices.

    plan: a Plan or a plan file; by default that of `meshwise run --plan` or of the file that MESHWISE_PLAN names, else
    replicas. Optimizers made before go on with what it makes of the parameters.
    streams: how an iterable data set is split: `whole` (every rank reads it all and keeps its slice) or `per-rank`
    (the data set splits itself by `mw.rank()`). Raises UsageError for anything else that is given, PlanError for a plan
    that cannot be applied.
    """
    engine = default_engine()
    models = [thing for thing in objects if isinstance(thing, nn.Module)]
    if models or plan is not None:
        engine.add_models(models, choose_plan(plan, engine), piggyback_loss=True)
    seed = int(collectives.broadcast_object(torch.initial_seed())) % 2**31
    result = tuple(_distributed(thing, seed, engine, streams) for thing in objects)
    return result[0] if len(result) == 1 else result


def _distributed(thing: Any, seed: int, engine: Engine, streams: str) -> Any:
    if isinstance(thing, LRScheduler):
        engine.schedulers.add(thing)
        return thing
    if isinstance(thing, (nn.Module, DistributedLoader)):
        return thing
    if isinstance(thing, Optimizer):
        engine.add_optimizer(thing)
        return thing
    if isinstance(thing, DataLoader):
        own_seed = seed if thing.generator is None else thing.generator.initial_seed() % 2**31
        spec = split_loader(thing, own_seed, engine.world, streams)
        if spec.note:
            engine.notify(spec.note)
        return DistributedLoader(thing, spec, seed, engine)
    raise UsageError(
        f"mw.distribute takes models, optimizers, schedulers and DataLoaders; this is a {type(thing).__name__}."
    )


class DistributedLoader:
    """Gives this rank its slice of every batch of the user's loader; `len`, `dataset`, `batch_size` are the user's."""

    def __init__(self, loader: DataLoader[Any], spec: LoaderSpec, seed: int, engine: Engine) -> None:
        self.dataset, self.batch_size = loader.dataset, spec.batch_size
        self._spec, self._seed, self._engine = spec, seed, engine
        self._epoch, self._index, self._running = 0, 0, False

    def __len__(self) -> int:
        if self._spec.length is None:
            raise TypeError("this loader's length is not known: its data set or sampler has none")
        return self._spec.length

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
        engine, name = self._engine, f"epoch {self._epoch} of a loader"
        for batch, part in engine.batches(name, self._read(None), self.batch_size, limited=self._read):
            engine.seed_draws(mixed(self._seed, self._epoch), self._index)
            self._index += part.total
            batch = engine.cast(batch)
            engine.begin(part)
            yield batch
        if engine.stopped:
            raise KeyboardInterrupt("the run was asked to stop; every rank stops before the same batch")
        self._epoch, self._index, self._running = self._epoch + 1, 0, False

    def _read(self, limit: int | None) -> Iterator[tuple[Any, Any]]:
        """The rest of the epoch; with `limit` one batch more, of at most so many samples."""
        if limit == 0:
            return iter(())
        return prefetch(self._spec.pairs(self._epoch, self._index, limit), self._engine.program.device)


def backward(loss: Tensor, weight: Tensor | float | None = None) -> Tensor:
    """Add to `.grad` what one device would add for the whole batch of the loader; returns the global loss, detached.

    loss: a scalar mean over `weight` items of this rank's slice; by default over its samples, which the loader knows. A
    token mean passes its number of tokens. Collective: every rank calls it once a batch.
    """
    return default_engine().backward(loss, weight)


@contextlib.contextmanager
def accumulate() -> Iterator[None]:
    """`mw.backward` inside keeps its gradients on their rank; the next outside, or `optimizer.step`, reduces all."""
    with default_engine().accumulate():
        yield


def sum(value: Number) -> Number:
    """`value` added over all ranks, padding samples left out: the one extra line of an evaluation. Collective.

    Call it inside the loop over the loader. A number comes back as a number, a tensor as a tensor.
    """
    return default_engine().sum(value)


def rank() -> int:
    """This process's rank, from 0."""
    return rank_context().world.rank


def world_size() -> int:
    """How many ranks the run has."""
    return rank_context().world.size
