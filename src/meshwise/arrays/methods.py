"""The operators and methods of `Array`: the same functions that the namespace has.

Other files add theirs by `METHODS` and `PROPERTIES`, tables of functions whose first parameter is the array.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from torch import Tensor

from meshwise.arrays import elementwise, reading, reductions, statistics
from meshwise.arrays.arguments import checked, missing
from meshwise.arrays.array import Array
from meshwise.arrays.creation import Placement, asarray
from meshwise.arrays.elementwise import NoArrayGiven
from meshwise.arrays.moves import reshard
from meshwise.arrays.views import alone

BINARY = {
    "add": "add",
    "sub": "subtract",
    "mul": "multiply",
    "truediv": "divide",
    "floordiv": "floor_divide",
    "mod": "remainder",
    "pow": "pow",
    "and": "bitwise_and",
    "or": "bitwise_or",
    "xor": "bitwise_xor",
    "lshift": "bitwise_left_shift",
    "rshift": "bitwise_right_shift",
}
COMPARISONS = {
    "eq": "equal",
    "ne": "not_equal",
    "lt": "less",
    "le": "less_equal",
    "gt": "greater",
    "ge": "greater_equal",
}
UNARY = {"neg": "negative", "pos": "positive", "abs": "abs", "invert": "bitwise_invert"}


def of_this_space(x: Array, value: Any) -> Array | None:
    """An operand of NumPy or torch, or a list, as an array beside `x`; None for what is none."""
    return asarray(x.space, value) if isinstance(value, np.ndarray | np.generic | Tensor | list | tuple) else None


def operator(rule: Callable[..., Array], *, reflected: bool = False) -> Callable[[Array, Any], Any]:
    """A function of two arrays as an operator, which leaves to the other operand what it does not know."""

    def apply(self: Array, other: Any) -> Any:
        try:
            return rule(other, self) if reflected else rule(self, other)
        except NoArrayGiven:
            made = of_this_space(self, other)
        if made is None:
            return NotImplemented
        return rule(made, self) if reflected else rule(self, made)

    return apply


def in_place(rule: Callable[..., Array]) -> Callable[[Array, Any], Any]:
    """`x += y`: the values of `x` change, and all that refers to it sees that. TypeError where its dtype would."""
    apply = operator(rule)

    def change(self: Array, other: Any) -> Any:
        terms = elementwise.terms_of_same(rule, self, other)
        if terms is not None and alone(self):
            for mine, term in zip(self.parts, terms, strict=True):
                rule.op(mine, term, out=mine)  # type: ignore[attr-defined]
            return self
        new = apply(self, other)
        if new is NotImplemented:
            return new
        if new.shape != self.shape:
            raise ValueError(f"in place on shape {self.shape}: the result has shape {new.shape}. Write x = x + y.")
        if new.dtype is not self.dtype:
            raise TypeError(f"in place on {self.dtype}: the result is {new.dtype}. Write x = x + y.")
        self.parts = reshard(new, self.sharding, rule.__name__).parts
        return self

    return change


def resharded(x: Array, sharding: Placement = None, /, *, device: Any = None) -> Array:
    """`x` laid out anew, in memory of its own. sharding: as `xp.shard(1)`; device: one that then holds it all."""
    return asarray(x.space, x, device=device, sharding=sharding, copy=True)


def to_device(x: Array, device: Any, /, *, stream: Any = None) -> Array:
    """A copy of `x` on one device of the namespace."""
    if stream is not None:
        raise ValueError("to_device with a stream: meshwise orders copies itself. Leave it out.")
    return asarray(x.space, x, device=device, copy=True)


def shards(x: Array) -> tuple[Tensor, ...]:
    """The tensors of the places that are here, in order of the places of `x.sharding`; no copy."""
    return x.parts


def length(x: Array) -> int:
    """`len(x)`."""
    if not x.shape:
        raise TypeError("len of an array without dims: it has no length.")
    return x.shape[0]


def size(x: Array) -> int:
    """How many elements the array has."""
    return int(np.prod(x.shape, dtype=np.int64))


def no_such(x: Array, name: str) -> Any:
    """What `x.name` says where there is none."""
    if isinstance(own := Array.__dict__.get(name), property):
        return own.fget(x)  # type: ignore[misc]  # it raises again what it had to say
    raise AttributeError(missing("an array", name, (each for each in dir(Array) if each[0] != "_")))


METHODS: dict[str, Callable[..., Any]] = {
    "reshard": resharded,
    "to_device": to_device,
    "numpy": reading.numpy,
    "torch": reading.tensor,
    "item": reading.number,
    "__float__": reading.as_float,
    "__int__": reading.as_int,
    "__bool__": reading.as_bool,
    "__complex__": reading.as_complex,
    "__index__": reading.as_index,
    "__repr__": reading.text,
    "__len__": length,
    "__getattr__": no_such,
}
PROPERTIES: dict[str, Callable[[Array], Any]] = {
    "ndim": lambda x: len(x.shape),
    "size": size,
    "device": lambda x: x.space.device_name(x.sharding),
    "shards": shards,
    "nbytes": lambda x: size(x) * x.dtype.itemsize,
    "itemsize": lambda x: x.dtype.itemsize,
}


def install(methods: dict[str, Callable[..., Any]], properties: dict[str, Callable[[Array], Any]]) -> None:
    """Give `Array` these methods and properties."""
    for name, method in methods.items():
        setattr(Array, name, method if name.startswith("__") else checked(f"x.{name}", method))
    for name, read in properties.items():
        setattr(Array, name, property(read, doc=read.__doc__))


def install_operators() -> None:
    """Give `Array` the operators of `elementwise.py`."""
    rules = elementwise.FUNCTIONS
    for name, rule in BINARY.items():
        install_binary(name, rules[rule])
    for name, rule in COMPARISONS.items():
        setattr(Array, f"__{name}__", operator(rules[rule]))
    for name, rule in UNARY.items():
        setattr(Array, f"__{name}__", rules[rule])


def install_binary(name: str, rule: Callable[..., Array]) -> None:
    """Give `Array` an operator, its reflected one and the one in place."""
    setattr(Array, f"__{name}__", operator(rule))
    setattr(Array, f"__r{name}__", operator(rule, reflected=name not in ("add", "mul")))
    setattr(Array, f"__i{name}__", in_place(rule))


install_operators()
install(
    METHODS | {name: reductions.FUNCTIONS[name] for name in ("sum", "prod", "max", "min", "any", "all")}, PROPERTIES
)
install({name: statistics.FUNCTIONS[name] for name in ("mean", "var", "std", "argmax", "argmin")}, {})
