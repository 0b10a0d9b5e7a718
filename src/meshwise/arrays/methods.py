"""Give `Array` its operators and methods.

Many are also functions of the namespace, such as `sum`.

Other files list more in `METHODS` and `PROPERTIES`, tables of functions whose first parameter is the array.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from torch import Tensor

from meshwise.arrays import elementwise, reading, reductions, statistics
from meshwise.arrays.aliases import apart, entangled, fetched, fill, is_number, writable, written
from meshwise.arrays.align import aligned
from meshwise.arrays.arguments import checked, missing
from meshwise.arrays.array import Array
from meshwise.arrays.creation import Placement, asarray
from meshwise.arrays.dtypes import of_scalar
from meshwise.arrays.elementwise import NoArrayGiven
from meshwise.arrays.rules import Table

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
    """Convert NumPy values, a tensor or a list to an array of the namespace of `x`.
    Return None for other types."""
    return asarray(x.space, value) if isinstance(value, np.ndarray | np.generic | Tensor | list | tuple) else None


def operator(rule: Callable[..., Array], *, reflected: bool = False) -> Callable[[Array, Any], Any]:
    """Make a method for an operator of `Array` from a function of two arrays."""

    def apply(self: Array, other: Any) -> Any:
        try:
            return rule(other, self) if reflected else rule(self, other)
        except NoArrayGiven:
            made = of_this_space(self, other)
        if made is None:
            return NotImplemented
        return rule(made, self) if reflected else rule(self, made)

    return apply


def _terms(rule: Any, x: Array, other: Any) -> Sequence[Any] | None:
    """Return the operand for each part of `x` in an operation such as `x += other`, or None if it needs a new array."""
    if x.dtype not in getattr(rule, "takes", ()):
        return None
    if type(other) is Array:
        more = x.ndim - other.ndim
        if other.dtype is not x.dtype or other.space != x.space or more < 0:
            return None
        if other.shape == x.shape and other.sharding == x.sharding:
            return other.parts
        repeats = all(own in (1, length) for own, length in zip(other.shape, x.shape[more:], strict=True))
        return aligned(rule.__name__, [x, other], x.sharding)[2][1] if repeats else None
    if (
        rule.numbers
        and type(other) in elementwise.NUMERIC
        and of_scalar(other, x.dtype, x.space.default_float) is x.dtype
    ):
        return (other,) * len(x.parts)
    return None


def changing(rule: Callable[..., Array]) -> Callable[[Array, Any], Any]:
    """Make the method for an in-place operator such as `x += y`, which changes `x` for every reference to it."""
    apply = operator(rule)

    def change(self: Array, other: Any) -> Any:
        if is_number(self):
            return apply(self, other)
        terms = _terms(rule, self, other)
        if terms is not None:
            shares = entangled(self, other)
            for mine, term in zip(writable(self), terms, strict=True):
                rule.op(mine, apart(term, mine) if shares else term, out=mine)  # type: ignore[attr-defined]
            written(self)
            return self
        new = apply(self, other)
        if new is NotImplemented:
            return new
        if new.shape != self.shape:
            raise ValueError(f"an in-place operation cannot change shape {self.shape} to {new.shape}. Write x = x + y.")
        if new.dtype is not self.dtype:
            raise TypeError(f"an in-place operation cannot change {self.dtype} to {new.dtype}. Write x = x + y.")
        fill(self, new, rule.__name__)
        return self

    return change


def resharded(x: Array, sharding: Placement = None, /, *, device: Any = None) -> Array:
    """Copy `x` into another layout."""
    return asarray(x.space, x, device=device, sharding=sharding, copy=True)


def to_device(x: Array, device: Any, /, *, stream: Any = None) -> Array:
    """Copy `x` to one device of the namespace."""
    if stream is not None:
        raise ValueError("to_device does not support stream=, because meshwise orders copies itself. Leave stream out.")
    return asarray(x.space, x, device=device, copy=True)


def shards(x: Array) -> tuple[Tensor, ...]:
    """The parts of the array in this process, as torch tensors in the order of `x.sharding.places`."""
    return x.parts


def length(x: Array) -> int:
    """Return `len(x)`, the length of the first dim. Raises TypeError for an array without dims."""
    if not x.shape:
        raise TypeError("an array without dims has no len(). Read its only element with x.item().")
    return x.shape[0]


def no_such(x: Array, name: str) -> Any:
    """Implement `Array.__getattr__`, which Python calls if an attribute is missing."""
    if name == "parts":
        return fetched(x)
    if isinstance(own := Array.__dict__.get(name), property):
        return own.fget(x)  # type: ignore[misc]  # run the property again to raise its own error
    raise AttributeError(missing("an array", name, (each for each in dir(Array) if each[0] != "_")))


METHODS: Table = {
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
PROPERTIES: Table = {
    "device": lambda x: x.space.device_name(x.sharding),
    "shards": shards,
    "itemsize": lambda x: x.dtype.itemsize,
}


SETTERS: Table = {
    "real": lambda x, value: x.real.__setitem__(..., value),
    "imag": lambda x, value: x.imag.__setitem__(..., value),
}
"""Functions (array, value) that assign a property, by the property's name."""


def install(methods: Table, properties: Table) -> None:
    """Add these methods and properties to the class `Array`."""
    for name, method in methods.items():
        setattr(Array, name, method if name.startswith("__") else checked(f"x.{name}", method))
    for name, read in properties.items():
        setattr(Array, name, property(read, SETTERS.get(name), doc=read.__doc__))


def install_operators() -> None:
    """Add the operators of `elementwise.py` to the class `Array`."""
    rules = elementwise.FUNCTIONS
    for name, rule in BINARY.items():
        install_binary(name, rules[rule])
    for name, rule in COMPARISONS.items():
        setattr(Array, f"__{name}__", operator(rules[rule]))
    for name, rule in UNARY.items():
        setattr(Array, f"__{name}__", rules[rule])


def install_binary(name: str, rule: Callable[..., Array]) -> None:
    """Add a binary operator to `Array`, with its reflected form and its in-place form."""
    setattr(Array, f"__{name}__", operator(rule))
    setattr(Array, f"__r{name}__", operator(rule, reflected=name not in ("add", "mul")))
    setattr(Array, f"__i{name}__", changing(rule))


install_operators()
install(
    METHODS | {name: reductions.FUNCTIONS[name] for name in ("sum", "prod", "max", "min", "any", "all")}, PROPERTIES
)
install({name: statistics.FUNCTIONS[name] for name in ("mean", "var", "std", "argmax", "argmin")}, {})
