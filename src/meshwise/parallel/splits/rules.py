"""Choose how an operator runs on split tensors: on parts or gathered.

A rule must return what the operator returns for whole tensors, whether the result is split or not, with right
gradients. Results are then correct for any placement of the parameters, and more rules only save communication.
tests/parallel/splits/test_split_rules.py compares each rule with its operator.
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

from meshwise.parallel.splits import along, attention, elementwise, losses, picking, products, reducing, rows, shapes
from meshwise.parallel.splits.crossing import gather, scatter
from meshwise.parallel.splits.rule import NoRule, Rule
from meshwise.parallel.splits.tensor import (
    SplitTensor,
    at_level,
    dispatch_with,
    is_split,
    levels_below,
    split,
    whole_shape,
)
from meshwise.spec.words import some
from meshwise.torch_compat.torch_function import called, change_arguments_of_functions, on_parts, written_out
from meshwise.torch_compat.tree import map_kind

RULES: dict[str, Rule] = {
    name: rule
    for room in (elementwise, shapes, along, products, losses, attention)
    for name, rule in room.RULES.items()
}
"""The rule of each torch function that has one, by the function's name. A rule runs the function on split tensors."""
WRITTEN_OUT = {"multi_head_attention_forward", "gaussian_nll_loss", "multilabel_soft_margin_loss"}
WRITTEN_OUT |= {"triplet_margin_with_distance_loss"}
"""Torch functions that need no rule in RULES, because RULES has the operators that their Python code calls."""
READS = {"__bool__", "__float__", "__int__", "__index__", "__format__", "__repr__", "__array__", "__reduce_ex__"}
READS |= {"item", "numpy", "tolist"}
"""Functions that read values out of tensors."""
gathered: Counter[str] = Counter()
"""How often each function, by its name, had to gather split tensors, because no rule in RULES could run it."""
seconds: defaultdict[str, float] = defaultdict(float)
"""How long each of these functions took, including the gathering, in seconds."""
_large: set[str] = set()
"""The functions without a rule that had to gather activations (floating-point tensors of at least three dims)."""


def dispatch(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Run a torch function whose arguments have split tensors: by its rule in `RULES`, or on whole tensors."""
    name = called(func)
    if name in WRITTEN_OUT:
        return written_out(func)(*args, **kwargs)
    levels = levels_below((*args, *kwargs.values()))
    if len(levels) > 1:
        with at_level(levels[0]):
            return _on_parts(name, func, args, kwargs)
    with on_parts():
        if not levels:  # called by a rule on its parts, which count as plain tensors
            return func(*args, **kwargs)
        with at_level(levels[0]):
            return _on_parts(name, func, args, kwargs)


def _on_parts(name: str, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    if name.startswith("."):
        return _property(name, func, args)
    for rules in (RULES, picking.RULES, rows.RULES, reducing.RULES):
        if name in rules:
            try:
                return rules[name](func, args, kwargs)
            except NoRule:
                pass
    _count(name, args)
    begun = time.perf_counter()
    made = _on_the_whole(name, func, args, kwargs)
    seconds[name] += time.perf_counter() - begun
    return made


def _property(name: str, func: Callable[..., Any], args: Sequence[Any]) -> Any:
    tensor = args[0]
    if name == ".shape":
        return whole_shape(tensor)
    if name in (".T", ".mT"):
        return RULES["t"](func, args, {}) if name == ".T" else RULES["transpose"](func, (tensor, -2, -1), {})
    if name in (".H", ".mH", ".real", ".imag"):
        return getattr(gather(tensor), name[1:])
    if name == ".nbytes":
        return whole_shape(tensor).numel() * tensor.element_size()
    found = func(*args)
    if name in (".data", ".grad") and isinstance(found, Tensor) and found.shape == tensor.shape:
        return split(found, tensor.part)
    return found


def _on_the_whole(name: str, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Gather split tensors, and call the function on the whole tensors."""
    whole: dict[int, Tensor] = {}

    def of(thing: SplitTensor) -> Tensor:
        if not is_split(thing):
            return thing
        if id(thing) not in whole:
            if name in READS:  # `gather` would wait forever if only some ranks read
                thing.part.axis.meet(name)
            found = gather(thing)
            whole[id(thing)] = found.clone() if thing is written else found
        return whole[id(thing)]

    first = args[0] if args else None
    written = first if writes_in_place(name) else None
    new_args, new_kwargs = map_kind(SplitTensor, of, (tuple(args), dict(kwargs)))
    result = func(*new_args, **new_kwargs)
    if is_split(first) and written is not None:
        first.copy_(scatter(whole[id(first)], first.part))
        return first if result is whole[id(first)] else result
    return read_only(name, result)


def read_only(name: str, result: Any) -> Any:
    """Return the result of a reading function. Arrays become read-only, because writes to them would be lost."""
    if name in ("numpy", "__array__"):
        result.flags.writeable = False
    return result


def writes_in_place(name: str) -> bool:
    """Return whether a function with this name writes to its first argument."""
    dunder = name.startswith("__") and name.endswith("__")
    return (
        name == "__setitem__"
        or (dunder and name[2] == "i" and name[2:-2] in IN_PLACE)
        or (name.endswith("_") and not dunder)
    )


IN_PLACE = {"iadd", "isub", "imul", "itruediv", "ifloordiv", "imod", "ipow", "iand", "ior", "ixor"}


def prepare() -> None:
    """Prepare for models with split tensors: the user's own autograd functions receive whole tensors from now on."""
    change_arguments_of_functions(_whole_arguments)
    gathered.clear()
    seconds.clear()
    _large.clear()


def said() -> list[str]:
    """Return a note on which operators had to gather activations. The list is empty if none had to."""
    names = sorted(_large, key=lambda name: (-gathered[name], name))
    text = f"every rank computes these operators whole, as no rule divides them: {some(names)}. Results are exact."
    return [text] if names else []


def _whole_arguments(name: str, args: Sequence[Any]) -> Sequence[Any]:
    """Return the arguments of a user's autograd function with split tensors gathered."""
    if any(is_split(each) for each in args):
        _count(name, args)
    return [gather(each) for each in args]


def _count(name: str, args: Sequence[Any]) -> None:
    gathered[name] += 1
    if name != "__reduce_ex__" and any(is_split(each) and each.is_floating_point() and each.dim() > 2 for each in args):
        _large.add(name)


dispatch_with(dispatch)
