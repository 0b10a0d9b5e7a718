"""Keep what torch's constructors make of a split tensor divided.

`Variable(x)`, `torch.Tensor(x)`, `other.new(x)` and `other.new_tensor(x)` would hold this rank's rows as if they were
the whole. `other.data = x` and `other.set_(x)` take the whole.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.autograd import Variable

from meshwise.compat.torch_function import is_asked
from meshwise.splits.crossing import gather
from meshwise.splits.tensor import SplitTensor
from meshwise.splits.term import Term, value_of


@functools.cache
def watch_constructors() -> None:
    """Keep what these constructors make of a batch divided, from now on."""
    places: list[tuple[Any, str, Any]] = [(Variable, "__new__", _detached), (Tensor, "__new__", _alias)]
    for owner, name, made in [*places, (Tensor, "new", _alias), (Tensor, "new_tensor", _copied)]:
        given = _given(getattr(owner, name), made)
        setattr(owner, name, staticmethod(given) if name == "__new__" else given)
    kind: Any = Tensor
    base: Any = Tensor.__base__
    held: Any = base.data

    def data(tensor: Any) -> Any:
        return held.__get__(tensor)

    written = _given(held.__set__, lambda into, x: held.__set__(into, x if _is_ours(into) else _whole(x)))
    kind.data = property(data, written)
    kind.set_ = _given(base.set_, lambda into, x, **_: base.set_(into, _whole(x)))


def _given(original: Callable[..., Any], made: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def construct(first: Any, *args: Any, **kwargs: Any) -> Any:
        ours = _is_ours(args[0] if args else kwargs.get("data"))
        return made(first, *args, **kwargs) if ours else original(first, *args, **kwargs)

    return construct


def _is_ours(thing: Any) -> bool:
    return isinstance(thing, (SplitTensor, Term)) and is_asked()


def _detached(kind: Any, data: Any, requires_grad: bool = False, *_: Any, **__: Any) -> Any:
    return data.detach().requires_grad_(bool(requires_grad))


def _alias(kind: Any, data: Any, **_: Any) -> Any:
    return data.view(data.shape)


def _copied(like: Any, data: Any, requires_grad: bool = False, **options: Any) -> Any:
    return _detached(
        None, data.detach().clone().to(**{"dtype": like.dtype, "device": like.device} | options), requires_grad
    )


def _whole(x: Any) -> Any:
    return (value_of(x) if isinstance(x, Term) else gather(x)).detach().clone()
