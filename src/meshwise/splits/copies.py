"""Refuse writes into copied rows that are views on one device."""

from __future__ import annotations

import weakref
from typing import Any

from torch import Tensor

from meshwise.compat.reducer import version
from meshwise.compat.torch_function import on_parts
from meshwise.spec.errors import UsageError
from meshwise.spec.user_code import user_place
from meshwise.splits.tensor import SplitTensor

VIEWS = "select chunk split unbind narrow tensor_split __iter__ diagonal hsplit vsplit"
_VIEWS = {*VIEWS.split()}
KEPT, MOST = 1 << 20, 64  # bytes, up to which a copy is held as long as its batch; copies of a batch that are noted
BASIC = (int, slice, type(None), type(Ellipsis))


def gives_view(name: str, args: Any) -> bool:
    """Return whether an operator gives a view of its first argument on one device."""
    if name != "__getitem__":
        return name in _VIEWS
    index = args[1] if isinstance(args[1], tuple) else (args[1],)
    return all(isinstance(each, BASIC) for each in index)


def note_copies(batch: SplitTensor, made: Any) -> None:
    """Note the results of such an operator that hold no memory of the batch."""
    with on_parts():
        memory = batch.untyped_storage().data_ptr()
        for each in made if isinstance(made, (tuple, list)) else (made,):
            if isinstance(each, Tensor) and each.untyped_storage().data_ptr() != memory:
                size = each.numel() * each.element_size()
                held: Any = (lambda each=each: each) if size <= KEPT else weakref.ref(each)
                noted = batch.__dict__.setdefault("copies", [])
                noted += [(held, version(each))] if len(noted) < MOST else []


def check_copies(batch: SplitTensor) -> None:
    """Raise UsageError if the program has written into such a copy of this batch."""
    if not (noted := batch.__dict__.get("copies")):
        return
    with on_parts():
        if any((each := held()) is not None and version(each) != before for held, before in noted):
            raise UsageError(
                f'{user_place()}: the program has written into rows that it took out of this batch. With view="whole" '
                "they are copies, so the batch keeps its values. Write into the batch: x[2] = 0, not x[2].zero_()."
            )
