"""Print a command's last line, after all output of its threads.

If nobody reads the output, the command prints nothing, and ends as usual.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable
from typing import Any

from meshwise.terminal.screen import fitted

_lock = threading.RLock()
_watched: list[_Watched] = []


class _Watched:
    """Replaces the `write` and `flush` of a text file, such as stdout, and remembers whether the file's last line has
    ended."""

    def __init__(self, file: Any, lost: type[OSError]) -> None:
        self.file, self.lost, self.ended, self.over = file, lost, True, False
        file.write, file.flush = self.write, self.flush  # print, tracebacks, logging and rich all call these two

    def write(self, text: str) -> int:
        with _lock:
            if not self.over:
                self._while_read(lambda: type(self.file).write(self.file, text))
                self.ended = text.endswith("\n") if text else self.ended
        return len(text)

    def flush(self) -> None:
        self._while_read(lambda: type(self.file).flush(self.file))

    def _while_read(self, act: Callable[[], object]) -> None:
        try:
            act()
        except self.lost:
            self.over = True
            os.dup2(os.open(os.devnull, os.O_WRONLY), self.file.fileno())


def watch(out: Any, beside: Any) -> None:
    """Watch what is written to stdout (`out`) and stderr (`beside`). `say_last` can then end unfinished lines there
    before it prints the last output of the command."""
    _watched[:] = _Watched(out, BrokenPipeError), _Watched(beside, OSError)


def end_lines() -> None:
    """End the unfinished lines of the program on stdout and stderr. Text that is written there later is dropped."""
    with _lock:
        for each in _watched:
            with contextlib.suppress(OSError, ValueError):  # the reader may be gone, or the file closed
                each.write("" if each.ended else "\n")
                each.file.flush()
            each.over = True


def say_last(*texts: str) -> None:
    """Print these texts on stderr, one per line, as the last output of the command. Raises OSError if that fails."""
    with _lock:
        end_lines()
        file = _watched[-1].file
        file = os.fdopen(2, "w", closefd=False) if file.closed else file
        type(file).write(file, "".join(f"{fitted(text, file)}\n" for text in texts if text))
        file.flush()
