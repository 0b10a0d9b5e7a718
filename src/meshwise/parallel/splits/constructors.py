"""Make torch's constructors return split tensors for split tensors.

Otherwise, `Variable(x)`, `torch.Tensor(x)`, `torch.FloatTensor(x)`, `other.new(x)` and `other.new_tensor(x)` would hold
this rank's rows as a whole tensor. `other.data = x`, `other.set_(x)` and subclasses of tensors get the gathered tensor.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Variable

from meshwise.parallel.splits.crossing import gather
from meshwise.parallel.splits.tensor import SplitTensor
from meshwise.parallel.splits.term import Term, resolved, value_of
from meshwise.torch_compat.beside_dispatch import replace
from meshwise.torch_compat.torch_function import is_asked


@functools.cache
def watch_constructors() -> None:
    """From now on, make torch's constructors return split tensors for batches."""
    makes = "_make_subclass"
    places: list[tuple[Any, str, Any]] = [(Variable, "__new__", _detached), (Tensor, "__new__", _alias)]
    places += [(Tensor, makes, functools.partial(_subclassed, getattr(Tensor, makes)))]
    for owner, name, made in [*places, (Tensor, "new", _alias), (Tensor, "new_tensor", _copied)]:
        given = _given(getattr(owner, name), made)
        setattr(owner, name, given if name.startswith("new") else staticmethod(given))
    for owner, names in ((torch, MADE), (torch, TAKEN), (Tensor, TAKEN)):
        for name in names.split():
            setattr(owner, name, _counted(getattr(owner, name)))
    kind: Any = Tensor
    base: Any = Tensor.__base__
    held: Any = base.data

    def data(tensor: Any) -> Any:
        return held.__get__(tensor)

    def as_subclass(x: Any, cls: Any) -> Any:
        if cls is Tensor and _is_ours(x):
            return _alias(cls, x)
        return base.as_subclass(_exact(x) if _is_ours(x) else x, cls)

    written = _given(held.__set__, lambda into, x: held.__set__(into, x if _is_ours(into) else _whole(x)))
    kind.data, kind.as_subclass = property(data, written), as_subclass
    kind.set_ = _given(base.set_, lambda into, x, **_: base.set_(into, _whole(x)))
    rooms = (torch, torch.get_device_module())
    kinds = {each for room in rooms for each in vars(room).values() if type(each) is _KINDS}
    replace({id(each): _standing(each) for each in kinds})


MADE = "arange range randperm randint eye linspace logspace tril_indices triu_indices"
TAKEN = "multinomial topk kthvalue narrow roll repeat_interleave"
"""Functions of torch that read a number from an argument's memory, where a sum has only this rank's part."""


def _counted(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def made(*args: Any, **kwargs: Any) -> Any:
        return original(*as_numbers(args), **as_numbers(kwargs))

    return made


def as_numbers(thing: Any) -> Any:
    """Replace each sum over ranks by its number in arguments such as indices and lengths, as in `x[:n]`."""
    if isinstance(thing, slice):
        return slice(*map(as_numbers, (thing.start, thing.stop, thing.step)))
    if isinstance(thing, Mapping):
        return {name: as_numbers(each) for name, each in thing.items()}
    if type(thing) in (tuple, list):
        return type(thing)(map(as_numbers, thing))
    return thing.item() if isinstance(thing, Term) and not thing.dim() else thing


_KINDS = type(torch.FloatTensor)


class _Stands(type):
    """The metaclass of substitutes for classes such as `torch.FloatTensor`, whose constructors cannot be replaced.
    torch reads only the names of these classes."""

    kind: Any

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        ours = args and _is_ours(args[0]) and args[0].dtype == cls.kind.dtype
        return _alias(cls, args[0]) if ours else cls.kind(*args, **kwargs)

    def __instancecheck__(cls, thing: Any) -> bool:
        return isinstance(thing, cls.kind)

    def __getattr__(cls, name: str) -> Any:
        return getattr(cls.kind, name)


def _standing(kind: Any) -> _Stands:
    module, name = kind.__module__, kind.__name__
    return _Stands(f"{module}.{name}", (), {"kind": kind, "__module__": module, "__qualname__": name})


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


def _subclassed(original: Any, kind: Any, data: Any, *args: Any, **kwargs: Any) -> Any:
    return _detached(kind, data, *args) if kind is Tensor else original(kind, _whole(data), *args, **kwargs)


def _whole(x: Any) -> Any:
    return (value_of(x) if isinstance(x, Term) else gather(x)).detach().clone()


def _exact(x: Any) -> Any:
    return resolved(x) if isinstance(x, Term) else gather(x)
