"""Pause Python's collector of reference cycles."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def no_collections() -> Iterator[None]:
    """Disable Python's garbage collector within the context. Code that creates many long-lived objects, such as the
    events of a trace, then runs up to twice as fast."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()
