"""End a process: report a sudden end, and keep imports intact.

A call of `os._exit` is reported, with its line, before it ends the process (`on_exit`).

When Python exits, it clears its modules, which copies the memory pages that the workers of a machine share. `exit_now`
keeps libraries intact, but joins threads, calls exit functions and flushes open files as a normal exit does.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import io
import os
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

from meshwise.spec.user_code import OURS, is_users, user_place

WRITERS = (io.TextIOWrapper, io.BufferedWriter, io.BufferedRandom)
_codes: list[int] = []
OF_COMMAND = (
    "{call} ended the command too early. Return from the function that meshwise calls, or raise an exception. Parse "
    "the command line under `if __name__ == '__main__':`."
)
OF_RANK = "{call} ended the process before its work was done. Return, or raise an exception, instead."


def exit_now(code: int) -> NoReturn:
    """End this process with an exit code, once its work is done."""
    _codes.append(code)
    sys.exit(code)


@atexit.register  # import this module before others, so that this function runs last
def _end() -> None:
    if not _codes:
        return
    threading.excepthook = lambda _: None  # hide errors of daemon threads that use an emptied module
    sys.setswitchinterval(60)  # keep other threads from creating objects while `get_objects` lists them
    _flush(*[each for each in gc.get_objects() if type(each) in WRITERS])
    for module in list(sys.modules.values()):
        if (file := getattr(module, "__file__", None)) and is_users(file):
            vars(module).clear()
    gc.collect()
    _flush(sys.stdout, sys.stderr)
    ctypes.PyDLL(None).exit(_codes[0])  # PyDLL holds the GIL: no thread runs Python during C's exit functions


def _flush(*files: Any) -> None:
    for file in files:
        with contextlib.suppress(AttributeError, OSError, ValueError):  # None, a closed file, or a reader that has gone
            file.flush()


@contextlib.contextmanager
def on_exit(tell: Callable[[str], object]) -> Iterator[None]:
    """Inside the `with` block, call `tell` just before `os._exit` ends this process at once.

    For example, this calls `tell("train.py:3: os._exit(0)")`. Calls in forked processes do not count, since they are
    normal there. Meshwise's own calls do not count either, since meshwise says itself why it ends a process.
    """
    process, ends = os.getpid(), os._exit

    def call(status: int) -> NoReturn:
        caller = sys._getframe(1)
        if os.getpid() == process and not caller.f_code.co_filename.startswith(OURS):
            at = user_place(caller)
            tell(f"{at}: " * bool(at) + f"os._exit({status!r})")
        ends(status)

    os._exit = call
    try:
        yield
    finally:
        os._exit = ends
