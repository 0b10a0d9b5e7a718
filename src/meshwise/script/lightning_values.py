"""The values of a Lightning module that are of all ranks: what it logs, its metrics, predictions and losses.

What a step has logged is joined at its end, in one collective: from there on Lightning has the values of one device.
The metrics of torchmetrics see the rows of all ranks, in the order of the data, and compute alone.
Tested in tests/script/test_lightning.py.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn

from meshwise.autograd.loss_graph import adds_rows, cross_entropy_means, summed_loss
from meshwise.engine.engine import Engine
from meshwise.script.over_ranks import joined
from meshwise.spec.errors import UsageError
from meshwise.transfer import collectives

AT_ONCE = 32
"""Values that are joined in one collective, which is as long for fewer: a rank that logs others is found by it."""
OTHERS = (
    "Lightning: the ranks have logged other values in one step ({names}). Log the same on every rank: what depends on "
    "the data of a rank comes as a value, such as 0."
)
OF_ONE_RANK = (
    "Lightning: self.log({name!r}) outside of a step is of this rank's samples ({own:.6g}; others have {other:.6g}). Log "
    "it in the step, or use a metric of torchmetrics, or self.all_gather(torch.cat(rows)) before it is computed; or say "
    "reduce_fx='sum'."
)
NOT_ROWS = (
    "Lightning: {what} has a value that is no row for each sample and differs between the ranks ({value!r}). Give rows."
)
SHAPES = (
    "Lightning: {what} has rows of shape {shape} on this rank, and others elsewhere. Pad them to the same length "
    "(a collate_fn that pads to a fixed one)."
)
TWO = (
    "Lightning: the loss has {count} cross entropies that are means over other items than samples, so it is not known "
    "how the parts of several devices add up. Compute it as a mean over samples, or in a loop with mw.backward(weight=)."
)


@dataclass(frozen=True)
class Logged:
    """A value of a step. size: its batch_size, and whether the program gave that. weight: what it is a mean over."""

    results: Any
    key: str
    value: Tensor
    size: int
    given: bool
    weight: Tensor | None


@dataclass(eq=False)
class Ranks:
    """What the classes of ours in front of Lightning's share.

    add, share: see `distribute_lightning`. loss: of all ranks, of the newest backward. kind: of losses. said: the
    weight and the reduction of the newest. open: loops
    over loaders, of training or not. states: of loaders, from a checkpoint. sizes: batch sizes of the loaders.
    """

    engine: Engine
    trainer: Any
    add: Callable[[list[nn.Module]], None]
    share: Callable[[Any], Any]
    loss: Tensor | None = None
    kind: str | None = None
    said: tuple[Tensor | None, str | None] = (None, None)
    inside: bool = False
    states: list[dict[str, Any]] = field(default_factory=list)
    sizes: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.open: dict[bool, WeakSet[Any]] = {True: WeakSet(), False: WeakSet()}
        self.pending: list[Logged] = []

    @property
    def alone(self) -> bool:
        return self.engine.world.size == 1

    @property
    def divided(self) -> bool:
        return self.engine.plan.parameters_divided or self.engine.plan.state_divided

    @property
    def samples(self) -> int:
        """Of this rank's part of the batch; 1 outside of loops."""
        part = self.engine.part
        return 1 if part is None else part.samples

    @property
    def rows(self) -> int:
        """As many as this rank holds, with padding."""
        part = self.engine.part
        return 1 if part is None else len(part.indices)

    def close(self, training: bool | None = None) -> None:
        """End the loops that Lightning has left."""
        for kind in (True, False) if training is None else (training,):
            for batches in list(self.open[kind]):
                batches.close()
            self.open[kind].clear()

    def flush(self, *, always: bool = False) -> None:
        """Hand what was logged to Lightning, joined over the ranks. Collective, if anything was logged or `always`."""
        if self.alone or not (self.pending or always):
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
        if abs(float(sums[0, 0]) - ranks * told) > 1e-9 or abs(float(sums[0, 1]) - ranks * told**2) > 1e-9:
            raise UsageError(OTHERS.format(names="; ".join(map(str, collectives.gather_objects(names)))))
        for each, (weighed, weight, size, sized, counted) in zip(some, sums[1:], strict=False):
            meta, own = each.results[each.key].meta, each.value
            whole = self.engine.part.total if self.engine.part is not None else 1
            if meta.is_mean_reduction:
                value = weighed / weight
            elif meta.is_sum_reduction:
                value = weighed
            else:
                value = _extreme(self, own, "max" if meta.is_max_reduction else "min")
            said = size if not each.given or each.size not in (whole, *self.sizes) else torch.full_like(size, each.size)
            size = torch.where(sized == counted, torch.full_like(size, whole), said)
            value = joined(
                self.engine, value.to(own.dtype if own.is_floating_point() else torch.float64).to(own.device)
            )
            each.results.take(each.key, value, size.to(own.device))


def _numbers(ranks: Ranks, each: Logged, device: str) -> Tensor:
    """What a rank adds: its weighed value, the weight, its size, whether that is of its rows, whether it has samples."""
    has = ranks.samples > 0
    fits = each.size == ranks.rows
    of_items = each.given and not fits and each.size not in (*ranks.sizes, getattr(ranks.engine.part, "total", 1))
    meta, value = each.results[each.key].meta, each.value.detach().double().to(device).reshape(())
    weight: Any = each.weight if each.weight is not None else each.size if of_items else ranks.samples
    weight = torch.as_tensor(weight, dtype=torch.float64, device=device).reshape(()) * has
    weight = weight if meta.is_mean_reduction else torch.full_like(value, has)
    rest = [torch.full_like(value, number) for number in (each.size * has, fits * has, has)]
    return torch.stack([torch.where(weight != 0, value * weight, 0), weight, *rest])


def _extreme(ranks: Ranks, own: Tensor, op: str) -> Tensor:
    nothing = -float("inf") if op == "max" else float("inf")
    value = own.detach().double().to(ranks.engine.world.device).reshape(())
    return collectives.all_reduce(
        value.clone() if ranks.samples else torch.full_like(value, nothing), op, of="self.log"
    )


class ResultsOnRanks:
    """In front of the class of what a loop of Lightning has logged."""

    meshwise: Ranks

    def log(self, fx: str, name: str, value: Any, *args: Any, **options: Any) -> None:
        self._of = options.get("batch_size") is not None, _items(self.meshwise, value)
        super().log(fx, name, value, *args, **options)  # type: ignore[misc]

    def update_metrics(self: Any, key: str, value: Any, batch_size: int) -> None:
        ranks = self.meshwise
        if ranks.alone or not isinstance(value, Tensor):
            self.take(key, joined(ranks.engine, value) if isinstance(value, Tensor) else value, batch_size)
        elif self.batch is None:
            self.take(key, _outside(ranks, self[key].meta, value), batch_size)
        else:
            ranks.pending.append(Logged(self, key, value, batch_size, *self._of))

    def take(self, key: str, value: Any, batch_size: Any) -> None:
        """What one device would have logged."""
        super().update_metrics(key, value, batch_size)  # type: ignore[misc]


def _outside(ranks: Ranks, meta: Any, value: Tensor) -> Tensor:
    """A value that was logged outside of steps, at the end of an epoch. Collective."""
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
    """The weight and the reduction of a loss; which kind it is, the first one tells, on every rank."""
    if ranks.alone:
        return None, None
    if ranks.kind is None:
        own = (
            "sum" if summed_loss(loss) or adds_rows(loss, ranks.rows) else "items" if _is_of_items(ranks, loss) else ""
        )
        kinds = collectives.gather_objects(own)
        ranks.kind = next((kind for kind in ("sum", "items") if kind in kinds), "mean")
    if ranks.kind == "items":
        return _items_of(loss), None
    return None, ranks.kind


def _is_of_items(ranks: Ranks, loss: Tensor) -> bool:
    return any(targets != ranks.rows or weighed for _, targets, weighed in cross_entropy_means(loss))


def _items_of(loss: Tensor) -> Tensor:
    found = cross_entropy_means(loss)
    if len(found) != 1:
        raise UsageError(TWO.format(count=len(found)))
    return found[0][0]


def _items(ranks: Ranks, value: Any) -> Tensor | None:
    """What a logged loss is a mean over, where that is no samples."""
    if ranks.alone or not isinstance(value, Tensor) or value.grad_fn is None or not _is_of_items(ranks, value):
        return None
    return _items_of(value)


# Metrics and predictions.


def is_metric(module: nn.Module) -> bool:
    """Whether it is a metric of torchmetrics."""
    return any(cls.__module__ == "torchmetrics.metric" and cls.__name__ == "Metric" for cls in type(module).__mro__)


class MetricOnRanks:
    """In front of the class of a metric: it sees the rows of all ranks, and so has nothing to reduce."""

    meshwise: Ranks

    def update(self: Any, *args: Any, **options: Any) -> None:
        ranks = self.meshwise
        if ranks.inside or ranks.engine.part is None:
            super().update(*args, **options)  # type: ignore[misc]
            return
        name = type(self).__name__
        if any(cls.__module__ == "torchmetrics.aggregation" for cls in type(self).__mro__) and _is_number(args[0]):
            args, options = (_aggregated(ranks, name, *args, **options),), {}
        else:
            args, options = of_all(ranks, args, name), of_all(ranks, options, name)
        ranks.inside = True
        try:
            super().update(*args, **options)  # type: ignore[misc]
        finally:
            ranks.inside = False

    def sync(self, *args: Any, **options: Any) -> None:
        """Every rank has all rows already."""


def _is_number(value: Any) -> bool:
    return not isinstance(value, Tensor) or value.ndim == 0


def _aggregated(ranks: Ranks, name: str, value: Any, weight: Any = None) -> Tensor:
    """A number of this rank's rows, for a metric that adds up numbers. Collective."""
    own = torch.as_tensor(value).detach()
    if weight is not None or name not in ("MeanMetric", "SumMetric", "MaxMetric", "MinMetric"):
        raise UsageError(NOT_ROWS.format(what=f"{name}.update", value=value))
    if name in ("MaxMetric", "MinMetric"):
        return _extreme(ranks, own, name[:3].lower()).to(own)
    share = torch.stack([own.double() * (ranks.samples if name == "MeanMetric" else 1), own.new_ones(()).double()])
    share[1] *= ranks.samples
    sums = collectives.all_reduce(share if ranks.samples else torch.zeros_like(share), of=name)
    return (sums[0] / sums[1] if name == "MeanMetric" else sums[0]).to(own)


def of_all(ranks: Ranks, tree: Any, what: str) -> Any:
    """A tree of rows with those of all ranks, in the order of the loader; other values must be alike. Collective."""
    if ranks.alone:
        return tree
    if isinstance(tree, Tensor) and tree.ndim:
        return _rows(ranks, tree, what)
    if isinstance(tree, dict):
        return {name: of_all(ranks, value, what) for name, value in tree.items()}
    if type(tree) is list and len(tree) == ranks.rows and not all(_has_rows(ranks, each) for each in tree):
        parts = collectives.gather_objects(tree if ranks.samples else [])
        return [each for part in parts for each in part]
    if isinstance(tree, list | tuple):
        return type(tree)(of_all(ranks, value, what) for value in tree)
    value = tree.item() if isinstance(tree, Tensor) else tree
    if any(each != value for each in collectives.gather_objects(value)):
        raise UsageError(NOT_ROWS.format(what=what, value=value))
    return tree


def _has_rows(ranks: Ranks, value: Any) -> bool:
    return isinstance(value, Tensor) and value.ndim > 0 and len(value) == ranks.rows


def _rows(ranks: Ranks, tensor: Tensor, what: str) -> Tensor:
    mine = tensor.detach() if ranks.samples else tensor.detach()[:0]
    shape = zlib.crc32(repr((tuple(mine.shape[1:]), mine.dtype)).encode())
    told = collectives.all_gather(torch.tensor([len(mine), shape])).tolist()
    if any(other != shape for _, other in told):
        raise UsageError(SHAPES.format(what=what, shape=tuple(mine.shape[1:])))
    most = max(count for count, _ in told)
    filled = torch.cat([mine, mine.new_zeros((most - len(mine), *mine.shape[1:]))])
    gathered = collectives.all_gather(filled.contiguous(), of=what)
    return joined(ranks.engine, torch.cat([part[:count] for part, (count, _) in zip(gathered, told, strict=True)]))
