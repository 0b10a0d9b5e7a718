"""Convert arrays of NumPy, CuPy, Numba and JAX to tensors.

Memory is shared where the protocols allow it.

DLPack is tried first, since it also orders the two libraries' streams; then `__cuda_array_interface__` (version 3; this
module waits for its `stream`, as torch does not). A copy that cannot be avoided is logged. A tensor may share memory
with its array: do not write into a tensor that came from JAX, whose arrays must not change.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.utils.dlpack
from torch import Tensor

from meshwise.spec.errors import UsageError
from meshwise.spec.machine import HOST
from meshwise.transfer.comm_log import Stopwatch, note


def is_array(value: Any) -> bool:
    """Check whether `value` is an array of another library: of NumPy, or with DLPack or `__cuda_array_interface__`."""
    kind = type(value)
    return isinstance(value, np.ndarray) or hasattr(kind, "__dlpack__") or hasattr(kind, "__cuda_array_interface__")


def from_array(array: Any) -> Tensor:
    """Convert the array to a tensor on its own device, with shared memory if possible. Tensors are returned unchanged.

    A NumPy array is copied if it is read-only, is byte-swapped or has negative strides. Raises UsageError for other
    values.
    """
    if isinstance(array, Tensor):
        return array
    if isinstance(array, np.ndarray):
        return _from_numpy(array)
    kind = type(array)
    if hasattr(kind, "__dlpack__") and hasattr(kind, "__dlpack_device__"):
        try:
            return torch.utils.dlpack.from_dlpack(array)
        except (BufferError, RuntimeError, TypeError, ValueError) as error:
            if not hasattr(kind, "__cuda_array_interface__") and not hasattr(kind, "__array__"):
                raise UsageError(f"{_name(array)}: DLPack failed ({error}). Copy this array by its library.") from error
    if getattr(array, "__cuda_array_interface__", None) is not None:
        return _from_cuda_interface(array)
    if hasattr(kind, "__dlpack__") or hasattr(kind, "__array__"):
        return _copied(np.asarray(array), _name(array))
    raise UsageError(
        f"{_name(array)} is neither a tensor nor an array with __dlpack__ or __cuda_array_interface__. Pass a tensor."
    )


def _from_numpy(array: np.ndarray[Any, Any]) -> Tensor:
    backwards = any(stride < 0 for stride in array.strides)
    if not array.flags.writeable or backwards or not array.dtype.isnative:
        return _copied(array, "numpy")
    try:
        return torch.from_numpy(array)
    except (TypeError, ValueError) as error:
        raise UsageError(f"torch does not support dtype {array.dtype} or the strides of the array. {error}") from error


def _copied(array: np.ndarray[Any, Any], name: str) -> Tensor:
    watch = Stopwatch(None)
    try:
        tensor = torch.from_numpy(np.array(array, dtype=array.dtype.newbyteorder("="), order="C", copy=True))
    except (TypeError, ValueError) as error:
        raise UsageError(f"{name} array: torch does not support the dtype {array.dtype}. {error}") from error
    note("convert", f"{HOST} ({name})", HOST, tensor.nbytes, "copied", watch.stop())
    return tensor


def _from_cuda_interface(array: Any) -> Tensor:
    facts = array.__cuda_array_interface__
    if facts.get("mask") is not None:
        raise UsageError(f"{_name(array)} is a masked array, but torch has no masks. Fill its masked values first.")
    if not torch.cuda.is_available():
        raise UsageError(f"{_name(array)} is on a CUDA device, but torch finds none. Copy the array to the host first.")
    stream = facts.get("stream")
    if stream is not None:
        # In this interface, 1 is the legacy default stream (torch's default), and 2 is the thread's default stream.
        owner = torch.cuda.default_stream() if stream == 1 else torch.cuda.ExternalStream(stream)
        torch.cuda.current_stream().wait_stream(owner)
    return torch.as_tensor(array, device="cuda")


def _name(array: Any) -> str:
    return f"{type(array).__module__.split('.')[0]}.{type(array).__name__}"
