"""A split tensor: plain code sees the shape of the whole, its memory holds this rank's part.

Operators find it through `__torch_function__`. Rules (rules.py) run on parts alone, where that is exact; any other
operator finds the whole. Autograd sees plain operators on the parts: the gradient of a split tensor is split alike.

Tested in tests/parallel/test_split_rules.py and test_split_context.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from meshwise.compat.fake import over
from meshwise.parallel.split.axis import Part

Dispatch = Callable[[Callable[..., Any], Sequence[Any], Mapping[str, Any]], Any]
_dispatch: list[Dispatch] = []


class SplitTensor(Tensor):
    """See the module. `part` says which part of the whole this rank holds."""

    part: Part

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        return _dispatch[0](func, args, kwargs or {})


def split(local: Tensor, part: Part) -> SplitTensor:
    """`local` as this rank's part of a whole. It becomes a split tensor itself."""
    local.__class__ = over(SplitTensor, type(local))
    local.part = part  # type: ignore[attr-defined]
    return local  # type: ignore[return-value]


def split_again(tensor: Tensor, part: Part | None) -> Tensor:
    """A tensor that was split before autograd kept it, which knows plain tensors alone."""
    return tensor if part is None or isinstance(tensor, SplitTensor) else split(tensor, part)


def dispatch_with(rules: Dispatch) -> None:
    """Let `rules` carry out what is called on split tensors."""
    _dispatch[:] = [rules]


def whole_shape(tensor: Tensor) -> torch.Size:
    """The shape of the whole. To be called by rules, which see the shapes of parts."""
    shape = list(tensor.shape)
    if isinstance(tensor, SplitTensor):
        shape[tensor.part.dim] = tensor.part.length
    return torch.Size(shape)
