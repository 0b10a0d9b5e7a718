"""See what the host reads and writes by NumPy and files.

Not seen: addresses that a program takes itself, and views that are made before and then given to `numpy.array`, to
`numpy.asarray`, or to an ordinary array.
"""

from __future__ import annotations

import contextlib
import io
import socket
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np

from meshwise.torch_compat.c_methods import replaced
from meshwise.torch_compat.tree import leaves_of, map_kind

Use = Callable[[Any, bool, str], object]
"""Gets an array or another buffer, whether its bytes are written, and the name of the function that does it."""
READS = "argmax argmin argsort astype copy dot flatten item nonzero repeat take tobytes tofile tolist __reduce_ex__"
WRITES = "fill partition put sort"
WRITE_FIRST = "copyto place put putmask"
SHAPES = "broadcast_to empty_like expand_dims may_share_memory ndim reshape shape size split squeeze transpose"
"""Methods of arrays, then functions of NumPy. All functions but those of SHAPES read elements."""
BY_FILES: dict[str, tuple[type, ...]] = {
    "readinto": (io.FileIO, io.BufferedReader, io.BytesIO),
    "write": (io.FileIO, io.BufferedWriter, io.BytesIO),
    "recv_into": (socket.socket,),
}


@contextlib.contextmanager
def listen(use: Use) -> Iterator[None]:
    """In the block, call `use` when the host uses the bytes of a `PinnedArray`, or gives a buffer to a file."""
    with contextlib.ExitStack() as stack:
        for name, kinds in BY_FILES.items():
            for kind in kinds:
                stack.enter_context(replaced(kind, name, partial(_by_file, name)))
        stack.callback(_uses.clear)
        _uses.append(use)
        yield


_uses = list[Use]()


def _by_file(name: str, real: Any) -> Any:
    def call(self: Any, buffer: Any, *more: Any) -> Any:
        for use in _uses if not isinstance(buffer, bytes) else ():
            use(buffer, name != "write", name)
        return real(self, buffer, *more)

    return call


class PinnedArray(np.ndarray[Any, Any]):
    """A NumPy view of pinned memory. It tells when its elements are read or written."""

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **options: Any) -> Any:
        out = options.get("out", ())
        _tell(ufunc.__name__, (inputs, options))
        _tell(ufunc.__name__, inputs[0] if method == "at" else out, True)
        inputs, options = map_kind(PinnedArray, np.asarray, (inputs, options))
        found = getattr(ufunc, method)(*inputs, **options)
        return out[0] if len(out) == 1 else found

    def __array_function__(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        if (name := func.__name__) not in SHAPES.split():
            _tell(name, (args, kwargs))
            _tell(name, args[0] if name in WRITE_FIRST.split() else kwargs.get("out"), True)
        return super().__array_function__(func, types, args, kwargs)

    def __getattribute__(self, name: str) -> Any:
        if name in f"{READS} {WRITES}".split():
            _tell(name, self, name in WRITES)
        return super().__getattribute__(name)

    def __getitem__(self, key: Any) -> Any:
        found = super().__getitem__(key)
        _tell("__getitem__", () if np.may_share_memory(found, self) else self)
        return found

    def __setitem__(self, key: Any, value: Any) -> None:
        _tell("__setitem__", self, True)
        super().__setitem__(key, value)


def _tell(by: str, used: Any, writes: bool = False) -> None:
    for array in leaves_of(PinnedArray, used):
        for use in _uses:
            use(array, writes, by)
