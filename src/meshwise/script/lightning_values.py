"""Join a Lightning module's logged values and losses over ranks.

What a step has logged is reduced over ranks at the end of the step, in one collective: Lightning then has the values of
one device. Tested in tests/script/test_lightning.py.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any
from unittest import mock
from weakref import WeakSet

import torch
from torch import Tensor, nn

from meshwise.autograd.loss_graph import adds_rows, cross_entropy_means, is_of_items, summed_loss
from meshwise.compat import compiling
from meshwise.compat.dispatch import rehearsing
from meshwise.script.in_front import OfTrainer
from meshwise.script.lightning_kinds import MAX, MEAN, MIN, OTHER, SUM, Kinds
from meshwise.script.over_ranks import joined
from meshwise.spec.errors import UsageError
from meshwise.transfer import collectives

F = nn.functional
ITEMS = "meshwise_items"
"""The attribute in which a loss without an autograd graph keeps the number of items over which it is a mean."""
AT_ONCE = 32
"""How many values one collective reduces. This size is fixed, as ranks may have different numbers of values."""
OTHERS = (
    "Lightning: the ranks have logged different names in one step ({names}). Log the same names on every rank, with a "
    "value such as 0 where a rank has none."
)
OF_ONE_RANK = (
    "Lightning: self.log({name!r}) outside of a step logs {own:.6g} on this rank and {other:.6g} on another rank. Log "
    "the value in the step, use a metric of torchmetrics, or compute the value from self.all_gather(torch.cat(rows)). "
    "For a count, pass reduce_fx='sum'."
)
NO_MEAN = (
    "Lightning: self.log({name!r}) does not look like a mean, sum, maximum or minimum over the rows of a batch. The "
    "log shows the mean over the ranks' rows. For the value that one device has, use a metric of torchmetrics."
)
TWO = (
    "Lightning: the loss has {count} cross entropies that are means over other items than samples, so meshwise does "
    "not know how to add up the devices' parts. Compute a mean over samples, or write a loop with mw.backward(weight=)."
)


@dataclass(frozen=True)
class Logged:
    """A value that a step has logged.

    results, key: Lightning's collection of logged values, and the key of this value in the collection.
    size: the batch size with which the value was logged.
    given: True if the program passed the batch size to `self.log`, False if Lightning found it.
    weight: the number of items, such as tokens, over which the value is a mean. None for a mean over samples.
    logs: the names of the step and of the value, e.g. ("training_step", "loss")."""

    results: Any
    key: str
    value: Tensor
    size: int
    given: bool
    weight: Tensor | None
    logs: tuple[str, str]


@dataclass(eq=False)
class Ranks(OfTrainer):
    """The state shared by all classes of meshwise that override methods of Lightning's Trainer and its parts.

    loss: the newest loss that was passed to backward, over all ranks.
    kind: "sum", "mean" (losses are means over samples) or "items" (means over tokens or the like). None before a loss.
    said: the arguments (weight, reduction) with which `mw.backward` is called for the newest loss.
    items: the number of items over which the value that is being logged is a mean. None for a mean over samples.
    logs: the names of the step and of the value that is being logged, e.g. ("training_step", "loss").
    inside: whether a metric is being updated.
    states: the states of the loaders from a restored checkpoint.
    sizes: the batch sizes of the loaders.
    open: the unfinished loops over loaders: `open[True]` for training, `open[False]` for anything else.
    pending: the logged values that the ranks have not reduced yet.
    kinds: how each logged value depends on the rows of a batch, e.g. MEAN. The key has the form of `logs`.
    looks: the `Kinds` that finds out `kinds` while a step runs its first batch. None at any other time.
    looked: the names of the steps that have run a first batch."""

    loss: Tensor | None = None
    kind: str | None = None
    said: tuple[Tensor | None, str | None] = (None, None)
    items: Tensor | None = None
    logs: tuple[str, str] = ("", "")
    inside: bool = False
    states: list[dict[str, Any]] = field(default_factory=list)
    sizes: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.open: dict[bool, WeakSet[Any]] = {True: WeakSet(), False: WeakSet()}
        self.pending: list[Logged] = []
        self.looked, self.kinds = set[str](), dict[tuple[str, str], str]()
        self.looks: Kinds | None = None
        self.told: list[Tensor] = []  # what was logged alone

    @property
    def divided(self) -> bool:
        return self.engine.plan.parameters_divided or self.engine.plan.state_divided

    @property
    def rows(self) -> int:
        """How many rows this rank's part of the batch has, including padding."""
        part = self.engine.part
        return 1 if part is None else len(part.indices)

    def close(self, training: bool | None = None) -> None:
        """End the loops over loaders that Lightning has stopped reading. training: True ends only training loops, False
        only other loops. None ends all of them."""
        for kind in (True, False) if training is None else (training,):
            for batches in list(self.open[kind]):
                batches.close()
            self.open[kind].clear()

    def agree(self, hook: str) -> None:
        """Let the ranks agree on the kind of each value that a step logs: MEAN, SUM, MAX, MIN, SAME or OTHER.
        Collective.

        A value's kind says how the value depends on the rows of the batch, and so how the ranks reduce it. All ranks
        take over the kinds that the rank with the most rows has found. hook: the name of the step, such as
        `training_step`."""
        own = {name: kind for (where, name), kind in self.kinds.items() if where == hook}
        _, found = max(collectives.gather_objects((self.rows, own)), key=lambda each: each[0])
        self.kinds.update(((hook, name), kind) for name, kind in found.items())
        for name in [name for name, kind in found.items() if kind == OTHER]:
            self.engine.notify(NO_MEAN.format(name=name))

    def joined_by(self, each: Logged) -> str:
        """Return how a value is reduced over the ranks: MEAN, SUM, MAX or MIN."""
        meta, kind = each.results[each.key].meta, self.kinds.get(each.logs)
        if meta.is_mean_reduction:
            return kind if kind in (SUM, MAX, MIN) else MEAN
        return MAX if meta.is_max_reduction else MIN if meta.is_min_reduction else SUM

    def flush(self, *, always: bool = False) -> None:
        """Reduce the logged values over the ranks, and give them to Lightning. Collective if any values were logged, or
        if `always` is True."""
        if self.alone:
            values, self.told = self.told, []
            for value in values:
                joined(self.engine, value)
            return
        if not self.pending and not always:
            return
        waiting, self.pending = self.pending, []
        names = [each.key for each in waiting]
        told = zlib.crc32(repr(names).encode()) / 2**32
        for begin in range(0, max(len(waiting), 1), AT_ONCE):
            some = waiting[begin : begin + AT_ONCE]
            self._join(some, told, names)

    def _join(self, some: list[Logged], told: float, names: list[str]) -> None:
        device = self.engine.world.device
        rows = [_numbers(self, each, device) for each in some]
        table = torch.zeros(AT_ONCE, 5, dtype=torch.float64, device=device)
        if rows:
            table[: len(rows)] = torch.stack(rows)
        head = torch.tensor([[told, told**2, 0, 0, 0]], dtype=torch.float64, device=device)
        sums = collectives.all_reduce(torch.cat([head, table]), of="self.log")
        ranks = self.engine.world.size
        off = [] if rehearsing() else [float(sums[0, power - 1]) - ranks * told**power for power in (1, 2)]
        if any(abs(each) > 1e-9 for each in off):
            raise UsageError(OTHERS.format(names="; ".join(map(str, collectives.gather_objects(names)))))
        for each, (weighed, weight, size, sized, counted) in zip(some, sums[1:], strict=False):
            by, own = self.joined_by(each), each.value
            whole = self.engine.part.total if self.engine.part is not None else 1
            value = weighed / weight if by == MEAN else weighed if by == SUM else extreme(self, own, by)
            said = size if not each.given or each.size not in (whole, *self.sizes) else torch.full_like(size, each.size)
            size = torch.where(sized == counted, torch.full_like(size, whole), said)
            value = joined(
                self.engine, value.to(own.dtype if own.is_floating_point() else torch.float64).to(own.device)
            )
            each.results.take(each.key, value, size.round().to(own.device, torch.int64))


def _numbers(ranks: Ranks, each: Logged, device: str) -> Tensor:
    """Return a tensor of five numbers, which are then summed over the ranks: the value times its weight, the weight,
    the batch size, 1 if that size is this rank's number of rows (else 0), and 1 if this rank has samples (else 0)."""
    has = ranks.samples > 0
    fits = each.size == ranks.rows
    of_items = each.given and not fits and each.size not in (*ranks.sizes, getattr(ranks.engine.part, "total", 1))
    value = each.value.detach().double().to(device).reshape(())
    weight: Any = each.weight if each.weight is not None else each.size if of_items else ranks.samples
    weight = torch.as_tensor(weight, dtype=torch.float64, device=device).reshape(()) * has
    weight = weight if ranks.joined_by(each) == MEAN else torch.full_like(value, has)
    rest = [torch.full_like(value, number) for number in (each.size * has, fits * has, has)]
    return torch.stack([torch.where(weight != 0, value * weight, 0), weight, *rest])


def extreme(ranks: Ranks, own: Tensor, op: str) -> Tensor:
    """Return the largest (`op` is "max") or smallest value among the ranks that have samples. Collective."""
    nothing = -float("inf") if op == "max" else float("inf")
    value = own.detach().double().to(ranks.engine.world.device).reshape(())
    return collectives.all_reduce(
        value.clone() if ranks.samples else torch.full_like(value, nothing), op, of="self.log"
    )


class ResultsOnRanks:
    """Overrides Lightning's collection of logged values. A value that a step logs is first kept in `Ranks.pending`, and
    given to Lightning when it has been reduced over the ranks."""

    meshwise: Ranks

    def log(self, fx: str, name: str, value: Any, *args: Any, **options: Any) -> None:
        self._of = options.get("batch_size") is not None, self.meshwise.items, self.meshwise.logs
        if not self.meshwise.alone:
            options |= {"sync_dist": True, "sync_dist_fn": _as_it_is}  # or Lightning says that nothing is summed
        super().log(fx, name, value, *args, **options)  # type: ignore[misc]

    def update_metrics(self: Any, key: str, value: Any, batch_size: int) -> None:
        ranks = self.meshwise
        value = ranks.engine.program.plain(value) if isinstance(value, Tensor) else value
        if ranks.alone or not isinstance(value, Tensor):
            self.take(key, value, batch_size)
            if isinstance(value, Tensor):
                ranks.told.append(value)
            if self.batch is None:
                ranks.flush()
        elif self.batch is None:
            self.take(key, _outside(ranks, self[key].meta, value), batch_size)
        else:
            ranks.pending.append(Logged(self, key, value, batch_size, *self._of))

    def take(self, key: str, value: Any, batch_size: Any) -> None:
        """Let Lightning record a value that has already been reduced over the ranks. key, batch_size: as Lightning
        passes them to `update_metrics`."""
        super().update_metrics(key, value, batch_size)  # type: ignore[misc]


def _as_it_is(value: Any, **_: Any) -> Any:
    return value


def _outside(ranks: Ranks, meta: Any, value: Tensor) -> Tensor:
    """Reduce over the ranks a value that was logged outside of a step, for example at the end of an epoch.
    Collective."""
    every = collectives.gather_objects(float(value))
    if meta.is_sum_reduction or meta.is_max_reduction or meta.is_min_reduction:
        found = sum(every) if meta.is_sum_reduction else max(every) if meta.is_max_reduction else min(every)
        return joined(ranks.engine, value.new_tensor(found) if value.is_floating_point() else torch.tensor(found))
    other = max(every, key=lambda each: abs(each - float(value)))
    if abs(other - float(value)) > 1e-6 * max(abs(other), abs(float(value))):
        raise UsageError(OF_ONE_RANK.format(name=meta.name, own=float(value), other=other))
    return joined(ranks.engine, value)


# Losses.


def loss_kind(ranks: Ranks, loss: Tensor) -> tuple[Tensor | None, str | None]:
    """Return the (weight, reduction) to give to `mw.backward` with a loss. Return (None, None) on one device.

    A loss is a sum, a mean over samples, or a mean over other items, such as tokens. The ranks agree on this in a
    collective, for the first loss of a run. Later losses count as the same kind."""
    if ranks.alone:
        return None, None
    if ranks.kind is None:
        items = "items" if is_of_items(loss, ranks.rows) else ""
        own = "sum" if summed_loss(loss) or adds_rows(loss, ranks.rows) else items
        kinds = collectives.gather_objects(own)
        ranks.kind = next((kind for kind in ("sum", "items") if kind in kinds), "mean")
    if ranks.kind == "items":
        return _items_of(loss), None
    return None, ranks.kind


def _items_of(loss: Tensor) -> Tensor:
    found = cross_entropy_means(loss)
    if len(found) != 1:
        raise UsageError(TWO.format(count=len(found)))
    return found[0][0]


@contextlib.contextmanager
def logging(ranks: Ranks, module: Any, hook: str) -> Iterator[None]:
    """Return a context manager for a step of a Lightning module. After the step, the values that it has logged are
    reduced over the ranks. hook: the name of the step, such as `training_step`."""
    if ranks.alone:
        yield
        ranks.flush()
        return
    counting: Any = contextlib.nullcontext()
    if hook != "training_step":  # whose losses have a graph
        counting = mock.patch.object(F, "cross_entropy", _counting(ranks, F.cross_entropy))
    looks = ranks.looks = None if hook in ranks.looked or compiling.is_used() else Kinds(ranks.rows)
    ranks.looked.add(hook)
    module.__dict__["log"] = functools.partial(_log, ranks, hook, module.log)
    try:
        with counting, ranks.looks or contextlib.nullcontext():
            yield
    finally:
        del module.__dict__["log"]
        ranks.looks = None
    if looks is not None:
        ranks.agree(hook)
    ranks.flush(always=True)


def _log(ranks: Ranks, hook: str, log: Callable[..., None], name: str, value: Any, *args: Any, **options: Any) -> None:
    """Call `self.log`, and record whether the value is a mean, a sum or another function of the rows of the batch. How
    the ranks reduce the value depends on this record."""
    ranks.items = getattr(value, ITEMS, None)  # of a loss without a graph
    if isinstance(value, Tensor) and value.grad_fn is not None and is_of_items(value, ranks.rows):
        ranks.items = _items_of(value)
    if ranks.looks is not None and isinstance(value, Tensor):
        ranks.kinds[hook, name] = MEAN if ranks.items is not None else ranks.looks.of(value)
    ranks.logs = hook, name
    try:
        log(name, value, *args, **options)
    finally:
        ranks.items, ranks.logs = None, ("", "")


def _counting(ranks: Ranks, function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Wrap torch's cross entropy. If the loss is a mean over items other than samples, such as tokens, the wrapper
    stores the number of items in the attribute ITEMS of the loss. With class weights, it stores the sum of the weights
    instead."""

    @functools.wraps(function)
    def cross_entropy(*args: Any, **options: Any) -> Tensor:
        given = inspect.signature(function).bind(*args, **options)
        given.apply_defaults()
        loss, target, weight = function(*args, **options), given.arguments["target"], given.arguments["weight"]
        counts = given.arguments["reduction"] == "mean" and not target.is_floating_point()
        if counts and (target.numel() != ranks.rows or weight is not None):
            counted = target[target != given.arguments["ignore_index"]]
            setattr(loss, ITEMS, counted.new_tensor(counted.numel()) if weight is None else weight[counted].sum())
        return loss

    return cross_entropy
