"""Exchange arrays with other libraries: DLPack, NumPy, CUDA array interface.

NumPy's own functions also accept arrays of this namespace.

An array on one device is shared without a copy. An array on several devices is gathered first, so that the other
library gets all of it, never only a part. `x.shards` gives the parts.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from meshwise.arrays import reading
from meshwise.arrays.aliases import FOREIGN, is_last
from meshwise.arrays.arguments import checked, told
from meshwise.arrays.array import Alias, Array
from meshwise.arrays.creation import CREATION, asarray
from meshwise.arrays.dtypes import as_dtype, numpy_dtype, refuse_gradients
from meshwise.arrays.gathering import gathered
from meshwise.arrays.moves import agreed
from meshwise.arrays.rules import Table, by_name
from meshwise.arrays.sharding import resized, sharding
from meshwise.arrays.space import Space
from meshwise.spec.errors import UsageError
from meshwise.transfer.devices import OPEN_DEVICES, device_of
from meshwise.transfer.interop import from_array


def dlpack(
    x: Array,
    /,
    *,
    stream: Any = None,
    max_version: tuple[int, int] | None = None,
    dl_device: Any = None,
    copy: bool | None = None,
) -> Any:
    """Implement `x.__dlpack__()` of the array API standard."""
    whole = x if x.sharding.single and not x.space.over_ranks else gathered(x, "__dlpack__")
    if copy is False and whole is not x:
        if x.alias is not None and not is_last(x):
            raise BufferError("copy=False: an array with views needs a copy to move to one device. Leave copy out.")
        x.parts, x.sharding = whole.parts, whole.sharding
    given = {"stream": stream, "max_version": max_version, "dl_device": dl_device, "copy": copy}
    return whole.parts[0].__dlpack__(**{name: value for name, value in given.items() if value is not None})


def dlpack_device(x: Array, /) -> Any:
    """Implement `x.__dlpack_device__()`: return the first device that holds a part of `x`."""
    device = x.space.devices[x.sharding.places[0] if not x.space.over_ranks else x.space.here[0]]
    return torch.empty(0, device=device).__dlpack_device__()


def from_dlpack(space: Space, x: Any, /, *, device: Any = None, copy: bool | None = None) -> Array:
    """Make an array from an object that has a `__dlpack__` method."""
    if isinstance(x, Array):
        return asarray(space, x, device=device, copy=copy)
    if not hasattr(type(x), "__dlpack__"):
        raise TypeError(f"from_dlpack: {type(x).__name__} has no __dlpack__ method. Write xp.asarray(x).")
    if space.over_ranks:
        raise UsageError("from_dlpack works only in one process. With several ranks, use xp.from_shards on each rank.")
    tensor = from_array(x)
    refuse_gradients("from_dlpack", tensor.requires_grad)
    here = device_of(tensor)
    place = next((place for place in space.here if space.devices[place].type == here.type == "cpu"), None)
    if place is None:
        place = next((place for place in space.here if space.devices[place] == here), None)
    if device is not None or place is None or copy:
        return asarray(space, tensor, device=0 if device is None and place is None else device or place, copy=copy)
    found = Array((tensor,), sharding((place,)), tuple(tensor.shape), tensor.dtype, space)
    found.alias = Alias(FOREIGN)
    return found


def from_shards(space: Space, shards: Any, /, dim: int = 0) -> Array:
    """Make an array whose parts are the given tensors or arrays, one per device in order."""
    parts = [from_array(part) for part in shards]
    if len(parts) != len(space.here):
        raise UsageError(f"from_shards needs {len(space.here)} parts, one per device of the process, not {len(parts)}.")
    first = parts[0]
    for part, place in zip(parts, space.here, strict=True):
        refuse_gradients("from_shards", part.requires_grad)
        others = [(tuple(p.shape[:dim]), tuple(p.shape[dim + 1 :]), p.dtype, p.dim()) for p in (first, part)]
        if others[0] != others[1] or not 0 <= dim < part.dim():
            raise UsageError(
                f"from_shards(dim={dim}): all parts must have this dim, the same dtype, and equal lengths in all other "
                f"dims, but two parts are {tuple(first.shape)} {first.dtype} and {tuple(part.shape)} {part.dtype}."
            )
        if device_of(part).type != space.devices[place].type:
            raise UsageError(f"from_shards: the part for {space.names[place]} is on {part.device}. Move the part.")
    sizes = tuple(agreed(space, [part.shape[dim] for part in parts], "from_shards"))
    shape = resized(tuple(first.shape), dim, sum(sizes))
    found = Array(tuple(parts), sharding(space.places, dim, sizes), shape, first.dtype, space)
    found.alias = Alias(FOREIGN)
    return found


def as_numpy(x: Array, dtype: Any = None, copy: bool | None = None) -> np.ndarray[Any, Any]:
    """Implement `np.asarray(x)`."""
    here = x.sharding.single and x.parts and x.parts[0].is_cpu and not x.space.over_ranks
    shown = here and (x.alias is None or (x.alias.source is None and not x.alias.read_only))
    if here and not copy and not OPEN_DEVICES:  # open virtual devices are separate from the host, as GPUs are
        found = from_array_of(x.parts[0])
    elif copy is False:
        raise ValueError(f"np.asarray(copy=False): this array ({reading.where(x)}) must be copied. Leave copy out.")
    else:
        found = reading.numpy(x)
    if not (copy or shown):
        found.flags.writeable = False
    return found if dtype is None else found.astype(dtype, copy=False)


def from_array_of(tensor: Tensor) -> np.ndarray[Any, Any]:
    """Convert a tensor in host memory to a NumPy array that shares its memory."""
    try:
        return tensor.numpy()
    except TypeError as error:
        raise TypeError(f"NumPy has no dtype {tensor.dtype}. Cast the array first: x.astype(xp.float32).") from error


def cuda_interface(x: Array) -> Any:
    """Return the CUDA array interface of `x`, which CuPy and Numba read."""
    if x.sharding.single and x.parts and x.parts[0].is_cuda:
        return x.parts[0].__cuda_array_interface__
    raise AttributeError(f"__cuda_array_interface__: the array must be on one GPU, but it is: {reading.where(x)}.")


def numpy_functions(functions: Table) -> Table:
    """Return the methods that NumPy calls when its own functions, such as `np.sqrt(x)`, get an array of this
    namespace."""

    def ufunc(self: Array, called: Any, method: str, *given: Any, **kwargs: Any) -> Any:
        rule = functions.get(called.__name__)
        (into,) = kwargs.pop("out", (None,))
        if method != "__call__" or rule is None or kwargs:
            asked = (
                f"np.{called.__name__}"
                + ("" if method == "__call__" else f".{method}")
                + "".join(f", {k}=" for k in kwargs)
            )
            raise TypeError(f"{asked} is not supported for arrays of meshwise. Pass the values: np.asarray(x).")
        found = rule(*(asarray(self.space, v) if isinstance(v, np.ndarray | np.generic) else v for v in given))
        if into is None:
            return found
        if not np.can_cast(numpy_dtype(found.dtype), numpy_dtype(as_dtype(into.dtype)), "same_kind"):
            raise TypeError(
                f"np.{called.__name__}: out= has dtype {into.dtype}, but the result has {found.dtype}. Cast the result."
            )
        into[...] = found
        return into

    def function(self: Array, called: Any, types: Any, args: Any, kwargs: Any) -> Any:
        rule = functions.get(called.__name__)
        if called.__name__ in CREATION:
            rule = checked(called.__name__, CREATION[called.__name__], self.space)
        if rule is None:
            name = f"{called.__module__}.{called.__name__}"
            raise TypeError(f"{name} is not supported for arrays of meshwise. Pass the values: np.asarray(x).")
        try:
            return rule(*args, **kwargs)
        except TypeError as error:
            raise told(error, f"np.{called.__name__}", rule) from None

    return {"__array_ufunc__": ufunc, "__array_function__": function}


METHODS: Table = {
    "__dlpack__": dlpack,
    "__dlpack_device__": dlpack_device,
    "__array__": as_numpy,
}
PROPERTIES: Table = {"__cuda_array_interface__": cuda_interface}
MAKERS = by_name(from_dlpack, from_shards)
