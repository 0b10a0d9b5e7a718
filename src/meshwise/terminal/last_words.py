"""What a command says last: on a line of its own, and nothing of this process follows it, whatever its threads print.

Tested in tests/cli/test_refusals.py.
"""

from __future__ import annotations

import contextlib
import os
import threading
from typing import Any

from meshwise.terminal.screen import fitted

_lock = threading.RLock()
_watched: list[_Watched] = []


class _Watched:
    """A text file of which it is known whether its last line has ended. over: nothing is written any more."""

    def __init__(self, file: Any) -> None:
        self.file, self.ended, self.over = file, True, False
        file.write = self.write  # print, tracebacks, logging and rich ask the file for it

    def write(self, text: str) -> int:
        with _lock:
            if not self.over:
                type(self.file).write(self.file, text)
                self.ended = text.endswith("\n") if text else self.ended
        return len(text)


def watch(*files: Any) -> None:
    """From now on what is written to these text files is known to `say_last`; the last of them is where it says it."""
    _watched[:] = map(_Watched, files)


def say_last(text: str) -> None:
    """Say this, and nothing more. Raises OSError where nobody reads it."""
    with _lock:
        for each in _watched:
            with contextlib.suppress(OSError, ValueError):  # nobody reads it, or the program has closed it
                each.write("" if each.ended else "\n")
                each.file.flush()
            each.over = True
        file = _watched[-1].file
        file = os.fdopen(2, "w", closefd=False) if file.closed else file
        type(file).write(file, f"{fitted(text, file)}\n")
        file.flush()
