"""Make whole batches whose rows lie on the ranks."""

from __future__ import annotations

import random
from typing import Any

import numpy
import torch
from torch import Tensor
from torch.utils.data import DataLoader, default_collate

from meshwise.parallel.splits.axis import SplitPart
from meshwise.parallel.splits.crossing import gather, scatter
from meshwise.parallel.splits.rows_axis import DataAxis
from meshwise.parallel.splits.tensor import SplitTensor, split
from meshwise.parallel.splits.term import Term, heard, resolved
from meshwise.torch_compat.reducer import version
from meshwise.torch_compat.torch_function import on_parts
from meshwise.torch_compat.tree import all_leaves, map_tensors
from meshwise.training.data.generators import GLOBAL
from meshwise.training.data.order import BatchSlice


def reads_own_rows(loader: DataLoader[Any]) -> bool:
    """Return whether each rank can read its rows of a batch without the other rows."""
    if loader.collate_fn is not default_collate or loader.batch_sampler is None or _is_alike(loader.dataset):
        return False
    before = [handle.state() for handle in GLOBAL]
    try:
        sample = loader.dataset[0]
    except Exception:
        return False
    finally:
        for handle, state in zip(GLOBAL, before, strict=True):
            handle.set_state(state)
    return all(isinstance(leaf, (Tensor, int, float)) or hasattr(leaf, "__array__") for leaf in all_leaves(sample))


ALIKE = (torch.Generator, numpy.random.Generator, numpy.random.RandomState, random.Random, SplitTensor)


def _is_alike(thing: Any, depth: int = 4) -> bool:
    """Return whether every rank must read all rows, because a data set holds generators or split tensors."""
    if isinstance(thing, ALIKE):
        return True
    inner = list(thing[:16]) if isinstance(thing, (list, tuple)) else list(getattr(thing, "__dict__", {}).values())
    return depth > 0 and not isinstance(thing, (Tensor, type)) and any(_is_alike(each, depth - 1) for each in inner)


def whole_batch(batch: Any, own: BatchSlice, axis: DataAxis, *, read_own: bool) -> Any:
    """Return `batch` as the program sees it. read_own: whether it has only this rank's rows."""
    if heard and not read_own:
        heard[0]("a batch", list(all_leaves(batch)), {})

    def divided(leaf: Tensor) -> Tensor:
        if read_own:
            rows = leaf if own.samples else leaf[:0]
            return split(rows, SplitPart(axis, 0, own.micro))
        if leaf.dim() == 0 or leaf.shape[0] != own.total:
            return leaf
        leaf = gather(leaf) if isinstance(leaf, SplitTensor) else leaf
        return scatter(leaf, SplitPart(axis, 0, own.total))

    return map_tensors(divided, batch)


def with_rows(leaf: Tensor, part: SplitPart, divided: list[tuple[Tensor, Tensor, int]]) -> Tensor:
    """Divide a tensor with as many rows as the batch, and add it to `divided`. This is exact whatever the rows mean."""
    if isinstance(leaf, Term):
        return resolved(leaf)
    if type(leaf) is not Tensor or leaf.dim() <= part.dim or leaf.shape[part.dim] != part.length:
        return leaf
    own = scatter(leaf, part)
    with on_parts():
        divided.append((leaf, own, version(own)))
    return own


def write_back(divided: list[tuple[Tensor, Tensor, int]]) -> None:
    """Copy what a model wrote to this rank's rows of a whole tensor back into the whole tensor."""
    for whole, own, before in divided:
        with on_parts():
            written = version(own) != before
        if written and 0 not in whole.stride():  # torch refuses to write into expanded memory
            with torch.no_grad():
                whole.copy_(gather(own))
