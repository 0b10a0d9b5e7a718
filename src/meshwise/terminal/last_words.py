"""Print a command's last line, after all output of its threads.

If nobody reads the output, the command prints nothing, and ends as usual.

Tested in tests/cli/test_refusals.py and tests/cli/test_hard_places.py.
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
    """A text file that remembers whether its last line has ended.

    lost: the class of the errors that are raised if nobody reads the file any more, such as BrokenPipeError. The
        command does not fail by such an error. It sets `over`, and nothing more is written.
    """

    def __init__(self, file: Any, lost: type[OSError]) -> None:
        self.file, self.lost, self.ended, self.over = file, lost, True, False
        file.write, file.flush = self.write, self.flush  # print, tracebacks, logging and rich ask the file for them

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
    """Keep track of what is written to stdout (`out`) and stderr (`beside`), so that `say_last` can end their lines."""
    _watched[:] = _Watched(out, BrokenPipeError), _Watched(beside, OSError)


def end_lines() -> None:
    """End the lines that the program has begun on stdout and stderr. Nothing more is written there afterwards."""
    with _lock:
        for each in _watched:
            with contextlib.suppress(OSError, ValueError):  # nobody reads it, or the program has closed it
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
