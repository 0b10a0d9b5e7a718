"""Report `os._exit`, `os.abort` and C's `exit`, with the calling line.

Each of these calls is reported before it ends the process.

Tested in tests/cli/test_odd_ends.py.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from meshwise.spec.user_code import OURS, user_place

OF_COMMAND = (
    "{call} ended the command too early. Return from the function that meshwise calls, or raise an exception. Parse "
    "the command line under `if __name__ == '__main__':`."
)
OF_RANK = "{call} ended the process before its work was done. Return, or raise an exception, instead."


@contextmanager
def told(tell: Callable[[str], object]) -> Iterator[None]:
    """Inside the `with` block, call `tell` just before a call such as `os._exit` ends this process at once.

    For example, this calls `tell("train.py:3: os._exit(0)")`. Calls in forked processes do not count, since they are
    normal there. Meshwise's own calls do not count either, since meshwise says itself why it ends a process.
    """
    process, before = os.getpid(), (os._exit, os.abort)
    modules: tuple[Any, ...] = (os, sys.modules[os.name])  # posix has them too
    libc, key = ctypes.CDLL(None), ctypes.byref(ctypes.c_char())

    def say(call: str, caller: FrameType) -> None:
        if os.getpid() == process and not caller.f_code.co_filename.startswith(OURS):
            at = user_place(caller)
            tell(f"{at}: " * bool(at) + call)

    def telling(ends: Any) -> Any:
        def call(*code: Any, **named: Any) -> Any:
            say(f"os.{ends.__name__}({', '.join(map(repr, (*code, *named.values())))})", sys._getframe(1))
            return ends(*code, **named)

        return call

    exits = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(lambda _: say("exit() of C", sys._getframe(1)))
    for module in modules:
        module._exit, module.abort = map(telling, before)
    libc.__cxa_atexit(exits, None, key)  # Python's atexit does not hear of it
    try:
        yield
    finally:
        for module in modules:
            module._exit, module.abort = before
        libc.__cxa_finalize(key)  # calls it, for us, and forgets it: Python is gone when this process ends
