"""Replace methods of classes that are written in C.

Python refuses to set attributes of such a class, for example of `torch.Event`; its dict can be changed. Based on
CPython 3.11 to 3.14: `Objects/typeobject.c`.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
from collections.abc import Callable, Iterator
from typing import Any


@contextlib.contextmanager
def replaced(kind: type, name: str, around: Callable[[Any], Any]) -> Iterator[None]:
    """In the block, the method `name` of the class `kind` is `around(method)`. Methods with two underscores stay."""
    real, own = getattr(kind, name), gc.get_referents(kind.__dict__)[0]
    before = {name: own[name]} if name in own else {}
    own[name] = around(real)
    ctypes.pythonapi.PyType_Modified(ctypes.py_object(kind))
    try:
        yield
    finally:
        del own[name]
        own.update(before)
        ctypes.pythonapi.PyType_Modified(ctypes.py_object(kind))
