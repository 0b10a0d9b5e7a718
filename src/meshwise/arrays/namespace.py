"""Make the array namespace of a list of devices.

`xp = mw.array_namespace("4xcpu")`, then `xp.sqrt(x)` as in NumPy.

The namespace collects functions of other files by their names. Only the functions that say where arrays lie are defined
here. A new file of functions gets an entry in `RULES`, or in `MAKERS` if its functions need no array.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from torch import Tensor

from meshwise.arrays import (
    casting,
    complex_parts,
    counting,
    creation,
    cumulative,
    dtensor,
    dtypes,
    elementwise,
    fft,
    files,
    grids,
    interop,
    layout,
    lookup,
    methods,
    nan_functions,
    norms,
    numpy_numbers,
    numpy_products,
    products,
    quantiles,
    reductions,
    sets,
    shapes,
    solving,
    sorting,
    spectra,
    spellings,
    statistics,
    ufuncs,
)
from meshwise.arrays.align import broadcast_shape
from meshwise.arrays.arguments import checked, missing, told
from meshwise.arrays.array import Array
from meshwise.arrays.dtypes import as_dtype
from meshwise.arrays.elementwise import NoArrayGiven
from meshwise.arrays.random import Random
from meshwise.arrays.rules import Table
from meshwise.arrays.sharding import Layout, as_layout
from meshwise.arrays.space import Space, find_space
from meshwise.spec.errors import UsageError
from meshwise.spec.machine import Machine

RULES: list[Table] = [
    elementwise.FUNCTIONS,
    complex_parts.FUNCTIONS,
    reductions.FUNCTIONS,
    statistics.FUNCTIONS,
    casting.FUNCTIONS,
    shapes.FUNCTIONS,
    spellings.FUNCTIONS,
    ufuncs.FUNCTIONS,
    counting.FUNCTIONS,
    files.FUNCTIONS,
    products.FUNCTIONS,
    cumulative.FUNCTIONS,
    sorting.FUNCTIONS,
    sets.FUNCTIONS,
    lookup.FUNCTIONS,
    quantiles.FUNCTIONS,
    nan_functions.FUNCTIONS,
    numpy_numbers.FUNCTIONS,
    numpy_products.FUNCTIONS,
]
"""Tables of functions whose arguments are arrays, by name."""
MAKERS: list[Table] = [
    creation.CREATION,
    interop.MAKERS,
    spellings.MAKERS,
    grids.MAKERS,
    files.MAKERS,
    dtensor.MAKERS,
]
"""Tables of functions that create arrays. The namespace passes its `Space` as their first argument."""
EXTENSIONS: dict[str, Table] = {
    "fft": fft.FUNCTIONS,
    "linalg": products.FUNCTIONS | solving.FUNCTIONS | spectra.FUNCTIONS | norms.FUNCTIONS | numpy_products.LINALG,
}
"""The functions of the nested namespaces `xp.linalg` and `xp.fft`, by name."""
EXTENSIONS["linalg"]["matrix_transpose"] = layout.matrix_transpose
PLAIN: dict[str, Any] = {
    **dtypes.NAMES,
    "bool": dtypes.BOOL,
    "e": math.e,
    "pi": math.pi,
    "inf": math.inf,
    "nan": math.nan,
    "newaxis": None,
    "result_type": dtypes.result_type,
    "can_cast": dtypes.can_cast,
    "isdtype": dtypes.isdtype,
    "broadcast_shapes": lambda *shapes: broadcast_shape("broadcast_shapes", shapes),
}
"""The names in a namespace `xp`, such as `xp.pi`, that do not depend on the devices of `xp`."""


class Names:
    """A namespace of functions, such as `xp.linalg` and `xp.fft`."""

    def __init__(self, title: str, names: dict[str, Any]) -> None:
        self.__dict__.update(names)
        self.__name__ = title

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(missing(self.__name__, name, self.__dict__))

    def __repr__(self) -> str:
        return f"<{self.__name__}>"


class Namespace(Names):
    """The functions and data types of the Python array API for arrays on some devices. Made by `mw.array_namespace`."""

    def __init__(self, space: Space) -> None:
        bound: dict[str, Any] = {name: checked(name, make, space) for table in MAKERS for name, make in table.items()}
        for table in RULES:
            bound |= {name: _bound(space, rule, name) for name, rule in table.items()}
        for title, table in EXTENSIONS.items():
            names = {name: checked(name, make, space) for name, make in fft.MAKERS.items() if title == "fft"}
            bound[title] = Names(title, names | {name: _bound(space, rule, name) for name, rule in table.items()})
        super().__init__(f"array namespace of {', '.join(space.names)}", PLAIN | bound)
        self.space = space
        self.devices = space.names
        self.ndarray = Array
        self.random = Random(space)
        names = self.__dict__
        names |= {other: names[name] for other, name in spellings.ALIASES.items() if name in names}
        for name in elementwise.BINARY:
            ufuncs.as_ufunc(self, name, names[name])
        self.mgrid, self.ogrid = grids.Grid(self, sparse=False), grids.Grid(self, sparse=True)
        self.r_, self.c_ = grids.Joined(self, columns=False), grids.Joined(self, columns=True)

    def shard(
        self, dim: int = 0, sizes: Sequence[int] | None = None, weights: Sequence[float] | Machine | None = None
    ) -> Layout:
        """Return a layout that divides one dim over the devices. By default, the numbers of entries differ by at most
        one.

        sizes: the number of entries on each device.
        weights: a number for each device. The number of entries on a device is in proportion to its weight. If
            `weights` is a machine, such as `mw.find_machine()`, the memory speeds of its devices are the weights.
        """
        if isinstance(weights, Machine):
            weights = self.space.speeds(weights)
        return as_layout(self.space.places, dim, sizes, weights)

    def __array_namespace_info__(self) -> casting.Info:
        """Return the devices, data types and capabilities, as the array API standard defines."""
        return casting.Info(self.space)

    def replicated(self) -> Layout:
        """Return the layout in which each device holds all of an array."""
        return Layout(self.space.places)

    def single(self, place: Any = 0) -> Layout:
        """Return the layout in which one device holds all of an array.

        place: the device's name, or its number in `xp.devices`.
        """
        return Layout((self.space.place(place),))


def _bound(space: Space, rule: Callable[..., Any], name: str) -> Callable[..., Any]:
    """Wrap a function of arrays to also accept NumPy arrays, NumPy scalars, tensors, lists and Python numbers."""

    @functools.wraps(rule)
    def call(*args: Any, **kwargs: Any) -> Any:
        if "out" in kwargs or (masks and "where" in kwargs):
            return _into(call, args, kwargs)
        try:
            return rule(*args, **kwargs)
        except NoArrayGiven:
            made = _arrays_of(space, args)
        except TypeError as error:
            found = told(error, name, rule)
            if found is error:
                raise
            raise found from None
        try:
            return rule(*made, **kwargs)
        except NoArrayGiven:
            if not any(isinstance(value, list | tuple) for value in made):
                raise
        return rule(*(creation.asarray(space, v) if isinstance(v, list | tuple) else v for v in made), **kwargs)

    masks = rule in elementwise.FUNCTIONS.values()
    return call


def _into(call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call an array function with NumPy's arguments `out` and `where`, if they are given."""
    out, shown = kwargs.pop("out", None), kwargs.pop("where", True)
    found = call(*args, **kwargs)
    if out is None and shown is True:
        return found
    if not isinstance(out, Array):
        raise UsageError(
            f"{call.__name__}: out must be an array of this namespace, not {type(out).__name__}. "
            "To use where without out, write xp.where(condition, result, otherwise)."
        )
    if not np.can_cast(dtypes.numpy_dtype(found.dtype), dtypes.numpy_dtype(out.dtype), "same_kind"):
        raise TypeError(f"{call.__name__}: cannot cast the result from {found.dtype} to {out.dtype}, the dtype of out.")
    out[...] = found if shown is True else found.__array_namespace__().where(shown, found, out)
    return out


def _arrays_of(space: Space, given: tuple[Any, ...]) -> list[Any]:
    def of_others(value: Any) -> Any:
        if isinstance(value, np.ndarray | np.generic | Tensor):
            return creation.asarray(space, value)
        if isinstance(value, list | tuple) and any(isinstance(each, np.ndarray | Array | Tensor) for each in value):
            return [of_others(each) for each in value]
        return value

    made = [of_others(value) for value in given]
    if (
        made
        and not any(isinstance(value, Array) for each in made for value in (each if isinstance(each, list) else [each]))
        and isinstance(made[0], int | float | complex | list)
    ):
        made[0] = creation.asarray(space, made[0])
    return made


@functools.cache
def namespace_of(space: Space) -> Namespace:
    """Return the namespace of a `Space`. Each `Space` has one namespace, which is made at the first call."""
    return Namespace(space)


def array_namespace(devices: Any = None, *, default_float: Any = "float64") -> Namespace:
    """Make a namespace with the Python array API and NumPy's names, for arrays whose parts lie on several devices.

    In a run with several ranks (`meshwise run`, torchrun) arrays lie on the ranks, and all ranks must make the same
    calls.

    devices: `"4xcpu"` for four virtual devices, `"cuda"` for all GPUs, or a list such as `["cuda:0", "cuda:1"]`, in
    which a device that is named twice counts as two. By default all GPUs, or one CPU if there is no GPU.
    default_float: the dtype of arrays that are made from Python floats.
    """
    kind = as_dtype(default_float)
    if not kind.is_floating_point:
        raise UsageError(
            f"array_namespace(default_float={default_float!r}): pass a float dtype, such as 'float32' or 'float64'."
        )
    return namespace_of(find_space(devices, kind))


def of_array(x: Array, /, *, api_version: str | None = None) -> Namespace:
    """Implement `x.__array_namespace__()` of the array API standard."""
    if api_version is not None and api_version > VERSION:
        raise ValueError(f"api_version {api_version} is newer than {VERSION}. Pass {VERSION}, or no api_version.")
    return namespace_of(x.space)


VERSION = "2025.12"
PLAIN["__array_api_version__"] = VERSION
methods.install({"__array_namespace__": of_array, "astype": casting.astype, **interop.METHODS}, interop.PROPERTIES)
KNOWN = {name: rule for table in RULES for name, rule in table.items()}
KNOWN = EXTENSIONS["linalg"] | EXTENSIONS["fft"] | KNOWN
KNOWN |= {other: KNOWN[name] for other, name in spellings.ALIASES.items() if name in KNOWN}
methods.install(interop.numpy_functions(KNOWN), {})
methods.install(spellings.METHODS | dtensor.METHODS | complex_parts.METHODS, complex_parts.PROPERTIES)
methods.install(shapes.METHODS, shapes.PROPERTIES)
methods.install_binary("matmul", products.matmul)
