"""Distribute a user's own training loop: `distribute`, `backward` and related functions.

    model, optimizer, loader = mw.distribute(model, optimizer, loader)
    for x, y in loader:
        loss = criterion(model(x), y)
        loss.backward()
        optimizer.step(); optimizer.zero_grad()

`distribute` returns the objects that it was given; only loaders are new. The loop sees whole batches. With
`view="rank"` it sees this rank's rows, and functions such as `backward` combine numbers: `backward` adds to `.grad`
what one device would add for the whole batch.
"""

from __future__ import annotations

import weakref
from collections.abc import Sized
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeVar, TypeVarTuple, cast, get_args, overload

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader

from meshwise.parallel.rng_notes import OF_DRAWS
from meshwise.reports.recorder import current
from meshwise.spec.errors import PlanError, UsageError, check_known
from meshwise.spec.plan import Plan
from meshwise.torch_compat.dispatch import rehearsing
from meshwise.training.data.split_loader import split_loader
from meshwise.training.data.wrapped_loader import loader_inside, read_through
from meshwise.training.engine import steps
from meshwise.training.engine.engine import IN_LOSS, Engine
from meshwise.training.engine.seeds import draw_alike
from meshwise.training.guards.same_data import samplers_of
from meshwise.training.process.plan_choice import choose_plan
from meshwise.training.process.session import default_engine, engines
from meshwise.training.script.distributed_loader import DistributedLoader
from meshwise.training.script.reductions import Number, gather_over_ranks, mean_over_ranks, sum_over_ranks
from meshwise.training.script.split_batch import split_batch
from meshwise.training.script.trainers import integrations_of
from meshwise.training.slips.in_a_run import says_divided
from meshwise.training.whole.view import OneDevice, WholeView
from meshwise.workers.verb_log import log_verb

First = TypeVar("First")
Second = TypeVar("Second")
More = TypeVarTuple("More")
View = Literal["whole", "rank"]


@overload
def distribute(
    only: First, /, *, plan: Plan | str | Path | None = None, streams: str = "whole", view: View | None = None
) -> First: ...
@overload
def distribute(
    first: First,
    second: Second,
    /,
    *more: *More,
    plan: Plan | str | Path | None = None,
    streams: str = "whole",
    view: View | None = None,
) -> tuple[First, Second, *More]: ...
def distribute(  # type: ignore[misc]  # mypy misreads the overload with a TypeVarTuple
    *objects: Any, plan: Plan | str | Path | None = None, streams: str = "whole", view: View | None = None
) -> Any:
    """Distribute models, optimizers and loaders over all devices, and return them in the same order.

    A single object is returned by itself, not in a tuple. On one device, only loaders are replaced.

    Models and optimizers are changed in place, and keep their class, hooks and state_dict keys. All ranks start with
    the values of rank 0. If the plan replaces the parameters of a model, an optimizer that already holds the old
    parameters gets the new parameters. Schedulers are returned unchanged.

    Each loader is replaced by a loader that yields whole batches, whose rows lie on the ranks. It has the same `len`,
    `batch_size` and order as torch's loader. Its state can be saved, and resumed on any number of devices. A loader
    that wraps a DataLoader and may read ahead (timm's PrefetchLoader) is not replaced, but reads the new DataLoader.

    A Trainer of transformers or Lightning is changed in place as a whole: `trainer = mw.distribute(trainer)`. Then call
    `trainer.train()` or `trainer.fit(model)`.

    plan: a Plan or a plan file. By default, this is the plan of `meshwise run --plan`, or the file that MESHWISE_PLAN
        names. If there is neither, each device holds a replica of the model.
    streams: which samples of an iterable data set a rank uses. With `whole`, every rank reads the whole data set, and
        keeps its slice of every batch. With `per-rank`, the data set must itself yield other samples on each rank,
        using `mw.rank()`.
    view: what the program sees of a batch. With `whole`, the default, it sees the whole batch as one tensor, whose rows
        lie on the ranks: a script for one device needs no other change, and its numbers are those of one device. With
        `rank`, it sees this rank's rows, and combines numbers with `mw.backward`, `mw.sum` and `mw.mean`; `context`
        and `streams="per-rank"` need it. The first call decides for all later ones.

    Raises UsageError for objects of any other kind and for two views in one program, and PlanError for a plan that
    cannot be applied."""
    log_verb("mw.distribute")
    trainers = integrations_of(objects)
    for each in trainers.values():
        each.join()
    engine, chosen = default_engine(), None
    models = [thing for thing in objects if isinstance(thing, nn.Module)]
    models += [model for thing in objects if id(thing) in trainers for model in trainers[id(thing)].models(thing)]
    _program_may_begin(engine, models)
    whole = _sees_whole_batches(engine, view, streams, own=next((each.view for each in trainers.values()), None))
    if models or trainers or plan is not None:
        current().program = next((each.program for each in trainers.values()), current().program)
        chosen = choose_plan(plan, engine)
        engine.notify.untrue = OF_DRAWS if whole else engine.notify.untrue
        _add_models(engine, chosen, models)
    if whole and engine.whole is None:
        _see_whole_batches(engine, files=not trainers)
    seed = draw_alike()
    for line in says_divided() if engine.world.size > 1 else ():
        engine.notify(line)
    share = partial(_distributed, seed=seed, engine=engine, streams=streams)
    add = partial(_add_models, engine, chosen or Plan())

    def given(thing: Any) -> Any:
        trainer = trainers.get(id(thing))
        return share(thing) if trainer is None else trainer.distribute(thing, engine, add, share)

    result = tuple(map(given, objects))
    return result[0] if len(result) == 1 else result


def _sees_whole_batches(engine: Engine, view: str | None, streams: str, *, own: str | None) -> bool:
    """Return whether the program sees whole batches, as the first call has chosen. own: a Trainer's view."""
    check_known("view", view or "whole", get_args(View))
    if own is not None and view not in (None, own):
        raise UsageError(f"view={view!r} is for training loops of your own. Leave it out for a Trainer.")
    before, view = engine.view, view or own
    if before is not None and view not in (None, before):
        raise UsageError(
            f"{'a Trainer' if own else 'this mw.distribute'} has view={view!r}, but an earlier mw.distribute of this "
            f"program has view={before!r}. Pass the same view in all calls."
        )
    engine.view = before or view or "whole"
    if engine.view == "whole" and streams == "per-rank":
        raise UsageError(
            "streams='per-rank' lets each rank read other samples, but this loop sees whole batches. Remove it, or "
            "pass view='rank' in all calls of mw.distribute and call mw.backward."
        )
    return engine.view == "whole"


def _see_whole_batches(engine: Engine, *, files: bool) -> None:
    """Let the program see whole batches from now on."""
    if engine.plan.context > 1:
        raise PlanError(
            f"context={engine.plan.context}: a loop that sees whole batches supports no context. Write a Job, or pass "
            "view='rank' and call mw.backward."
        )
    alone = engine.world.size == 1 or rehearsing()  # a rehearsal has no values, so it cannot prove rows independent
    engine.whole = OneDevice(engine) if alone else WholeView(engine, files=files)
    engine.whole.add_models(engine.program.models)


def _add_models(engine: Engine, plan: Plan, models: list[nn.Module]) -> None:
    _program_may_begin(engine, models)
    engine.add_models(models, plan)
    if engine.whole is not None:
        engine.whole.add_models(models)


def _distributed(thing: Any, seed: int, engine: Engine, streams: str) -> Any:
    if isinstance(thing, LRScheduler):
        engine.given.schedulers.add(thing)
        return thing
    if isinstance(thing, (nn.Module, DistributedLoader)):
        return thing
    if isinstance(thing, Optimizer):
        engine.add_optimizer(thing)
        return thing
    if isinstance(thing, DataLoader):
        own_seed = seed if thing.generator is None else thing.generator.initial_seed() % 2**31
        samples = len(thing.dataset) if isinstance(thing.dataset, Sized) else None
        engine.events.send("data_given", thing.dataset, samples, samplers_of(thing))
        world, whole = (engine.world, None) if engine.whole is None else engine.whole.loader(thing)
        return DistributedLoader(thing, split_loader(thing, own_seed, world, streams), seed, engine, whole)
    if (name := loader_inside(thing)) is not None:
        inner = _distributed(getattr(thing, name), seed, engine, streams)
        inner.wrapper = read_through(thing, name, inner)
        return thing
    if isinstance(getattr(thing, "optimizer", None), Optimizer) and callable(getattr(thing, "step", None)):
        return thing  # a scheduler that is not torch's, such as timm's
    raise UsageError(
        "mw.distribute takes models, optimizers, schedulers, DataLoaders, and loaders that wrap one DataLoader, but "
        f"was passed a {type(thing).__name__}. Write *models for the elements of a list."
    )


Real = TypeVar("Real", float, Tensor)
Tree = TypeVar("Tree")


def backward(
    loss: Tensor, weight: Tensor | float | None = None, reduction: Literal["mean", "sum"] | None = None
) -> Tensor:
    """Add to `.grad` what one device would add for the whole batch, and return the loss of that batch, detached.

    Collective: every rank calls it once for each batch.

    loss: a scalar for this rank's slice of the batch. By default, it counts as a mean over the samples of this slice.
    weight: how many items `loss` is a mean over, if these are not samples. For a mean over tokens, this is the number
        of tokens. For a class-weighted mean, it is the sum of the class weights of the targets
        (`weight=class_weights[y].sum()`).
    reduction: `sum` for a loss that is a sum over this rank's samples. The gradients then belong to the sum over the
        whole batch. By default, a loss that is known to be a sum raises UsageError on several devices. `mean` turns off
        this check.

    If the program has divided the loss, such as by the number of accumulation steps, the returned loss is divided by
    the same number. If a GradScaler has scaled the loss, the returned loss is unscaled, so that the result of
    `mw.backward(scaler.scale(loss))` can be printed."""
    log_verb("mw.backward")
    engine = engines[-1] if engines else default_engine()
    return (engine.whole or steps).backward(engine, loss, weight, reduction)  # type: ignore[no-any-return]


def split(*batch: Any, whole: bool = False, dim: int = 0) -> Any:
    """Split the rows of a batch among the ranks, for programs without a loader: `x = mw.split(x)`.

    The result still looks like the whole batch, as in a loop over a loader. Without the call, every rank computes the
    whole batch: exact, but not divided. With `view="rank"`, the program gets this rank's rows, and every rank must pass
    the same batch. A single argument is returned by itself, not in a tuple.

    batch: tensors, NumPy arrays, or trees of them, with equally many rows.
    whole: if True, nothing is divided. This is for a batch that has no rows, such as a graph or an episode.
    dim: the dimension of the samples.

    Raises UsageError if the batch has no rows, or for whole=True with `view="rank"`."""
    log_verb("mw.split")
    engine = default_engine()
    divided = split_batch(engine, batch, whole=whole, dim=dim)
    return divided[0] if len(divided) == 1 else divided


def _program_may_begin(engine: Engine, models: list[nn.Module]) -> None:
    """Prepare for another training program in the same process, if one begins with these models."""
    program, given = engine.program, engine.given
    if not program.begins_with(models):
        return
    engine.view = None if engine.whole is None else "whole"
    engine.notify.program_begins()
    given.earlier = weakref.WeakSet([*program.models, *program.optimizers, *given.schedulers])
    engine.events.send("program_begins")
    engine.events.begins()


def sum(value: Number, *, grad: bool = False) -> Number:
    """Return the sum of `value` over all ranks, without padding samples. Collective.

        dice = 2 * mw.sum((p * y).sum(), grad=True) / mw.sum((p + y).sum(), grad=True)
        mw.backward(1 - dice)

    value: in the loop over the loader, the value for this rank's part of the batch. After the loop, the value for all
        batches that this rank has read. A number is returned as a number, and a tensor as a detached tensor.
    grad: whether the sum keeps its gradient, for a loss over the whole batch that is not a mean over samples, as in the
        example. The sum is then on this worker's device, and every rank's loss must depend on it.

    Raises UsageError after a loop in which a batch had fewer samples than there are ranks: the value of a rank may then
    include a sample that only pads the batch. With `grad=True`, also raises UsageError under a plan with pipeline or
    accumulate, outside of a loop, and in a loss given to mw.backward with reduction="sum"."""
    log_verb("mw.sum")
    if _sees_whole():
        return value if grad or not isinstance(value, Tensor) else value.detach()
    return sum_over_ranks(_engine(), value, grad=grad)


def mean(value: Real, weight: float | Tensor | None = None, *, grad: bool = False) -> Real:
    """Return the mean of `value` over all ranks, as one device would compute it. Collective.

    value: in the loop over the loader, a mean over this rank's part of the batch. After the loop, a mean over all
        batches that this rank has read. For a mean over the last batch alone, such as its loss, call this in the loop.
        A number is returned as a float, and a tensor of any shape as a tensor.
    weight: how many items `value` is a mean over, such as tokens. By default, this is the number of samples.
    grad: whether the mean keeps its gradient, for use inside a loss, as with `mw.sum`.

    Raises UsageError after a loop in which a batch had fewer samples than there are ranks: the value of a rank may then
    include a sample that only pads the batch."""
    log_verb("mw.mean")
    if _sees_whole():
        return value if grad or not isinstance(value, Tensor) else value.detach()
    return cast(Real, mean_over_ranks(_engine(), value, weight, grad=grad))


def _sees_whole() -> bool:
    """Return whether the program sees whole batches: its numbers already cover all ranks."""
    return bool(engines) and engines[-1].whole is not None


def _engine() -> Engine:
    """Return the engine of the job whose loss function is running now, or else the default engine."""
    return IN_LOSS[-1] if IN_LOSS else default_engine()


def gather_samples(values: Tree) -> Tree:
    """Return the rows of all ranks, such as predictions, on every rank and in the loader's order. Collective.

    Padding is left out. (`mw.gather` is another function, for parts of an array in one process.)

    values: a tensor, or a tree of tensors, with one row for each sample. In the loop over the loader, these are the
        samples of this rank's part of the batch. After the loop, they are those of all its batches, concatenated.

    Raises UsageError unless all ranks give tensors with the same dtypes and the same further dimensions."""
    log_verb("mw.gather_samples")
    if _sees_whole():
        return values
    return cast(Tree, gather_over_ranks(default_engine(), values))
