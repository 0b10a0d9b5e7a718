"""Join torchmetrics and predictions of a Lightning module over ranks.

A metric gets the rows of all ranks, in the order of the data, and reduces nothing itself: so any metric is exact.
Tested in tests/script/test_lightning.py.
"""

from __future__ import annotations

import zlib
from typing import Any

import torch
from torch import Tensor, nn

from meshwise.compat.tree import tensors_in
from meshwise.script.in_front import in_front
from meshwise.script.lightning_values import Ranks, extreme
from meshwise.script.over_ranks import joined, rows_of_all
from meshwise.spec.errors import UsageError
from meshwise.transfer import collectives

NOT_ROWS = (
    "Lightning: {what} has a value ({value!r} here) that differs between ranks. Pass one row for each sample instead."
)
SHAPES = (
    "Lightning: {what} has rows of shape {shape} on this rank and of other shapes on other ranks. Pad all rows to the "
    "same length (with a collate_fn that pads to a fixed length)."
)


def see_all_rows(ranks: Ranks, model: nn.Module) -> None:
    """Make each torchmetrics metric in a model receive the rows of all ranks."""
    for module in model.modules():
        names = {(cls.__module__, cls.__name__) for cls in type(module).__mro__}
        if ("torchmetrics.metric", "Metric") in names and not isinstance(module, MetricOnRanks):
            in_front(MetricOnRanks, module, ranks)
            metric: Any = module
            state = metric.__getstate__()
            del metric.__dict__["update"], metric.__dict__["compute"]
            metric.__setstate__(state)  # which wraps its methods again, now ours


class MetricOnRanks:
    """Overrides methods of a torchmetrics metric. Every rank updates the metric with the rows of all ranks, so the
    ranks need not exchange the metric's state."""

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

    def compute(self) -> Any:
        value = super().compute()  # type: ignore[misc]
        for each in tensors_in(value):
            joined(self.meshwise.engine, each)
        return value

    def forward(self, *args: Any, **options: Any) -> Any:
        value = super().forward(*args, **options)  # type: ignore[misc]
        if self.meshwise.looks is not None and isinstance(value, Tensor):
            self.meshwise.looks.is_whole(value)
        return value

    def sync(self, *args: Any, **options: Any) -> None:
        """Do nothing, because the metric on every rank has the rows of all ranks already."""


def _is_number(value: Any) -> bool:
    return not isinstance(value, Tensor) or value.ndim == 0


def _aggregated(ranks: Ranks, name: str, value: Any, weight: Any = None) -> Tensor:
    """Reduce a number over all ranks, for a torchmetrics metric that aggregates numbers, such as MeanMetric.
    Collective."""
    own = torch.as_tensor(value).detach()
    if weight is not None or name not in ("MeanMetric", "SumMetric", "MaxMetric", "MinMetric"):
        raise UsageError(NOT_ROWS.format(what=f"{name}.update", value=value))
    if name in ("MaxMetric", "MinMetric"):
        return extreme(ranks, own, name[:3].lower()).to(own)
    share = torch.stack([own.double() * (ranks.samples if name == "MeanMetric" else 1), own.new_ones(()).double()])
    share[1] *= ranks.samples
    sums = collectives.all_reduce(share if ranks.samples else torch.zeros_like(share), of=name)
    return (sums[0] / sums[1] if name == "MeanMetric" else sums[0]).to(own)


def of_all(ranks: Ranks, tree: Any, what: str) -> Any:
    """Return `tree` with the rows of all ranks in the loader's order, in place of this rank's rows. Values that are not
    rows must be equal on all ranks, or UsageError is raised. Collective.

    what: the name of the metric or step, for the message."""
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
    counts = torch.tensor([[count] for count, _ in told])
    ranks.engine.events.send("joined", None)
    return rows_of_all(mine, counts, ranks.engine.world.rank, of=what)
