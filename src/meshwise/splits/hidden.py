"""Describe the hidden states that a pipeline stage sends to the next.

Tested in tests/parallel/test_pipeline.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from meshwise.compat.torch_function import on_parts
from meshwise.compat.tree import map_kind, map_tensors
from meshwise.splits.axis import SplitPart
from meshwise.splits.tensor import parts_of


@dataclass(frozen=True)
class Form:
    """The form of one tensor that a stage sends to the next. parts: how it is split over ranks. Empty for a whole
    tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    trained: bool
    parts: tuple[SplitPart, ...]


@dataclass(frozen=True)
class Hidden:
    """The output of a block that is sent to the next stage.

    form: the structure of the output, with a `Form` in place of each tensor.
    carried: further values that are sent along.
    before: the forms of the outputs of earlier blocks, by block number.
    """

    form: Any
    carried: list[Any]
    before: dict[int, Any]

    @property
    def tensors(self) -> list[Form]:
        return list(forms_in(self.form))


def one_stage_on(hidden: Hidden) -> Hidden:
    """Return what the third stage of a pipeline sends, if the second sends `hidden`, and both do the same."""
    own = len(hidden.before) // 2
    more = {number + own: form for number, form in hidden.before.items() if number >= own}
    return replace(hidden, before=hidden.before | more)


def form_of(given: Any) -> Any:
    """Return what a block gives with a `Form` in place of each tensor."""
    with on_parts():
        return map_tensors(lambda t: Form(tuple(t.shape), t.dtype, t.requires_grad, parts_of(t)), given)


def forms_in(tree: Any) -> Iterator[Form]:
    """Return the forms in the result of `form_of`, in order."""
    found: list[Form] = []
    map_kind(Form, found.append, tree)
    return iter(found)
