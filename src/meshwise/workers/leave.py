"""End a worker without taking apart what it has imported.

When Python exits, it clears its modules. That copies the memory pages that the workers of a machine share, so the exit
is when they need the most memory. As in a normal exit, threads are joined, exit functions called, open files flushed.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import io
import sys
import threading
from typing import Any, NoReturn

from meshwise.spec.user_code import is_users

WRITERS = (io.TextIOWrapper, io.BufferedWriter, io.BufferedRandom)
_codes: list[int] = []


def prepare() -> None:
    """Let this process need little memory when it ends by `leave`.

    At its end, Python clears all modules, which copies memory that the workers of a machine share. After this call,
    only the user's modules are cleared. Call this before any other exit function is registered, so that it runs last.
    """
    atexit.register(_end)


def leave(code: int) -> NoReturn:
    """End this process with an exit code, once its work is done."""
    _codes.append(code)
    sys.exit(code)


def _end() -> None:
    if not _codes:
        return
    threading.excepthook = lambda _: None  # a daemon thread may use a module that is empty
    sys.setswitchinterval(60)  # and makes no objects while they are listed
    _flush(*[each for each in gc.get_objects() if type(each) in WRITERS])
    for module in list(sys.modules.values()):
        if (file := getattr(module, "__file__", None)) and is_users(file):
            vars(module).clear()
    gc.collect()
    _flush(sys.stdout, sys.stderr)
    ctypes.PyDLL(None).exit(_codes[0])  # C's exit functions are called, while no thread runs Python


def _flush(*files: Any) -> None:
    for file in files:
        with contextlib.suppress(AttributeError, OSError, ValueError):  # there is none, it is closed, or nobody reads
            file.flush()
