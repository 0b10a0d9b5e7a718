"""Return freed memory to the system with glibc's `malloc_trim`.

glibc keeps freed memory that lies between live tensors.
"""

from __future__ import annotations

import ctypes
import sys
from typing import Any


def _find() -> Any:
    try:
        return ctypes.CDLL(None).malloc_trim if sys.platform == "linux" else None
    except AttributeError:  # another C library
        return None


_trim = _find()


def trim_heap() -> None:
    """Return freed memory to the operating system, if the C library is glibc. Takes some milliseconds."""
    if _trim is not None:
        _trim(0)
