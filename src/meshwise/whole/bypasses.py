"""Keep a program right where it bypasses the operators on batches.

What does so, and what becomes of it:

    constructors  `Variable(x)`, `torch.Tensor(x)`, `other.new(x)` and `other.new_tensor(x)` would hold this rank's rows
                  as if they were the batch: their results stay divided. `other.data = x` and `other.set_(x)` take the
                  whole. `torch.FloatTensor(x)` and the like still hold this rank's rows: nothing can stand in for them.
    writes        into rows of a batch that are copies here, but views on one device, are refused.
    collectives   that the program calls itself are said.
    hooks         of parameters are called behind the reduction: during a backward a gradient is this rank's part.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Variable

from meshwise.compat.modules import gradient_hooks
from meshwise.compat.program_calls import put
from meshwise.compat.reducer import version
from meshwise.compat.torch_function import is_asked, on_parts
from meshwise.compat.tree import all_leaves
from meshwise.engine.engine import Engine
from meshwise.process.session import sized
from meshwise.spec.errors import UsageError
from meshwise.spec.user_code import is_users, user_place
from meshwise.splits.crossing import gather
from meshwise.splits.tensor import SplitTensor
from meshwise.whole.term import Term, value_of

VIEWS = "select chunk split unbind narrow tensor_split __iter__ diagonal hsplit vsplit"
_VIEWS = {*VIEWS.split()}
KEPT, MOST = 1 << 20, 64  # bytes, up to which a copy is held as long as its batch; copies of a batch that are noted
BASIC = (int, slice, type(None), type(Ellipsis))
COLLECTIVES = """all_reduce all_gather all_gather_into_tensor all_gather_object reduce gather gather_object
reduce_scatter reduce_scatter_tensor all_to_all all_to_all_single"""
WHY = 'With view="whole" every number, loss and gradient of the program is that of the whole batch on each rank'
TWICE = "{place}: torch.distributed.{name} of the program. {why}: what it joins over {size} ranks counts {size} times."
SIZED = "{place}: asks for the number of ranks. {why}: do not multiply or divide by {size} what one device does not."


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


def watch_collectives(engine: Engine) -> None:
    """Say where the program calls a collective of torch, until the engine ends."""
    for name in (*COLLECTIVES.split(), "get_world_size"):
        engine.ends.callback(put([dist], name, functools.partial(_said, name, engine)))


def _said(name: str, engine: Engine, function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def called(*args: Any, **kwargs: Any) -> Any:
        if is_users(sys._getframe(1).f_code.co_filename):
            values = {"place": user_place(), "name": name, "why": WHY, "size": engine.world.size}
            if any(isinstance(each, (SplitTensor, Term)) for each in all_leaves((args, kwargs))):
                raise UsageError(TWICE.format(**values) + " Remove the call.")
            engine.notify((SIZED if name == "get_world_size" else TWICE).format(**values))
        return function(*args, **kwargs)

    return called


def say_sized(engine: Engine) -> None:
    """Say where the program has asked for the number of ranks by `mw.world_size`."""
    while sized:
        engine.notify(SIZED.format(place=sized.pop(), why=WHY, size=engine.world.size))


@contextlib.contextmanager
def hooks_behind_the_reduction(parameters: Iterable[weakref.ref[nn.Parameter]]) -> Iterator[None]:
    """Return a context manager for a backward and its reduction. The program's hooks are called at its end."""
    taken: list[tuple[nn.Parameter, Tensor | None, list[dict[int, Any]]]] = []
    for ref in parameters:
        if (p := ref()) is not None and any(own := [_take(held) for held in gradient_hooks(p)]):
            taken.append((p, p.grad, own))
            p.grad = None
    try:
        yield
    finally:
        for p, _, own in taken:
            for held, hooks in zip(gradient_hooks(p), own, strict=True):
                held.update(hooks)
    for p, earlier, (changing, after) in reversed(taken):
        if (found := p.grad) is None:
            p.grad = earlier
            continue
        with torch.no_grad():
            for hook in changing.values():
                made = hook(found)
                found = found if made is None else made
            p.grad = found if earlier is None else earlier.add_(found)
        for hook in after.values():
            hook(p)


def _take(held: dict[int, Any]) -> dict[int, Any]:
    """Remove the program's hooks from those of a parameter, and return them."""
    return {key: held.pop(key) for key in [key for key, hook in held.items() if is_of_program(hook)]}


def is_of_program(hook: Any) -> bool:
    """Return whether a hook is the program's own, and neither torch's nor meshwise's."""
    function = getattr(hook, "func", hook)  # of a partial
    module = getattr(function, "__module__", None) or type(function).__module__
    return not module.startswith(("meshwise.", "torch."))
