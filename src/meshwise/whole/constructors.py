"""Let constructors that bypass torch's dispatch keep a batch divided.

`Variable(x)`, `torch.Tensor(x)`, `other.new(x)` and `other.new_tensor(x)` would hold this rank's rows as if they were
the batch, and so would `other` after `other.data = x` or `other.set_(x)`, which get the whole. `torch.FloatTensor(x)`
and the like still hold this rank's rows: nothing can stand in for them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Variable

from meshwise.splits.crossing import gather
from meshwise.splits.tensor import SplitTensor
from meshwise.whole.term import Term, value_of


def _detached(kind: Any, data: Any, requires_grad: bool = False, *_: Any, **__: Any) -> Any:
    return data.detach().requires_grad_(bool(requires_grad))


def _alias(kind: Any, data: Any, **_: Any) -> Any:
    return data.view(data.shape)


def _copied(like: Any, data: Any, requires_grad: bool = False, **options: Any) -> Any:
    copied = data.detach().clone().to(**{"dtype": like.dtype, "device": like.device} | options)
    return copied.requires_grad_(bool(requires_grad))


@functools.cache
def begin() -> None:
    """Let these constructors keep a batch divided, from now on."""
    places: list[tuple[Any, str, Any]] = [(Variable, "__new__", _detached), (Tensor, "__new__", _alias)]
    for owner, name, made in [*places, (Tensor, "new", _alias), (Tensor, "new_tensor", _copied)]:
        given = _given(getattr(owner, name), made)
        setattr(owner, name, staticmethod(given) if name == "__new__" else given)
    kind: Any = Tensor
    base: Any = torch._C.TensorBase
    held: Any = base.data

    def data(tensor: Any) -> Any:
        return held.__get__(tensor)

    put = _given(held.__set__, lambda into, source: held.__set__(into, source if _is_ours(into) else _whole(source)))
    kind.data = property(data, put)
    kind.set_ = _given(base.set_, lambda into, source, **_: base.set_(into, _whole(source)))


def _is_ours(thing: Any) -> bool:
    return isinstance(thing, (SplitTensor, Term)) and torch._C._is_torch_function_enabled()


def _whole(source: Any) -> Any:
    return (value_of(source) if isinstance(source, Term) else gather(source)).detach().clone()


def _given(original: Callable[..., Any], made: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def construct(first: Any, *args: Any, **kwargs: Any) -> Any:
        ours = _is_ours(args[0] if args else kwargs.get("data"))
        return made(first, *args, **kwargs) if ours else original(first, *args, **kwargs)

    return construct
