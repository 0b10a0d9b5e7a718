"""Name the lines of code that a thread runs, innermost first.

Lines of the user's code, of libraries and of meshwise are named. Lines of torch and of Python itself are left out.
"""

from __future__ import annotations

import functools
import sys
import threading
from pathlib import Path
from types import FrameType
from typing import NamedTuple

from meshwise.spec.user_code import OURS, is_users, place

MOST_FRAMES = 100
LEFT_OUT = (f"{OURS}races", f"{OURS}compat", f"{OURS}equivalence")
MODES = {"__torch_function__", "_handled"}
"""Functions of meshwise that run in place of an operator that the user calls. Lines inside them are left out."""
LIBRARIES = ("/site-packages/", "/dist-packages/")
UNSEEN = "code that no line of Python is running"


class Line(NamedTuple):
    """A source line that was being executed."""

    file: str
    line: int
    function: str

    def __str__(self) -> str:
        ours = Path(self.file).relative_to(Path(OURS).parent) if _is_ours(self.file) else self.file
        return place(str(ours), self.line)


class Stack(NamedTuple):
    """Source lines that were being executed, the innermost first.

    of: the name of the autograd node that made the access, if these lines called its backward pass. Otherwise "".
    """

    lines: tuple[Line, ...]
    of: str = ""

    @property
    def place(self) -> str:
        """The innermost source line of the user's code or of meshwise, or else of another library."""
        own = (line for line in self.lines if _is_ours(line.file) or is_users(line.file))
        found = next(own, self.lines[0] if self.lines else None)
        return UNSEEN if found is None else str(found)


def stack(of: str = "") -> Stack:
    """Return the source lines that this thread is executing.

    A thread of autograd executes no such lines. For such a thread, the lines of the main thread are returned.

    of: the name of the autograd node that such a thread executes.
    """
    lines = _lines(sys._getframe(1))
    if lines:
        return Stack(lines)
    return Stack(_lines(sys._current_frames().get(threading.main_thread().ident or 0)), of)


def _lines(frame: FrameType | None) -> tuple[Line, ...]:
    found = list[Line]()
    for _ in range(MOST_FRAMES):
        if frame is None:
            break
        file = frame.f_code.co_filename
        if frame.f_code.co_name in MODES and not file.startswith(LEFT_OUT[0]):
            found = [line for line in found if not _is_ours(line.file)]
        if is_shown(file):
            found.append(Line(file, frame.f_lineno, frame.f_code.co_qualname))
        frame = frame.f_back
    return tuple(found)


def _is_ours(file: str) -> bool:
    return file.startswith(OURS)


@functools.cache
def is_shown(file: str) -> bool:
    """Return whether lines of this file are shown: all except those of torch, of Python and of the race detector."""
    library = next((name for name in LIBRARIES if name in file), None)
    if library is not None:
        return not file.partition(library)[2].startswith("torch/")
    return is_users(file) or (_is_ours(file) and not file.startswith(LEFT_OUT))
