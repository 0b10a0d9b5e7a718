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
"""Functions through which meshwise runs each operator. A `Stack` leaves out the lines of meshwise inside them."""
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
    """The source lines that the program was executing when something happened, such as a read of memory. The innermost
    line is first.

    of: the name of the autograd node that was running, e.g. "MulBackward0", if a thread of autograd ran it. Such a
        thread executes no Python lines, so `lines` are then the lines of the main thread, which called the backward.
        Otherwise `of` is "".
    """

    lines: tuple[Line, ...]
    of: str = ""

    @property
    def place(self) -> str:
        """The innermost line of the stack that is in the user's code or in meshwise. If all lines are in libraries, the
        innermost line of the stack."""
        own = (line for line in self.lines if _is_ours(line.file) or is_users(line.file))
        found = next(own, self.lines[0] if self.lines else None)
        return UNSEEN if found is None else str(found)


def stack(of: str = "") -> Stack:
    """Return the source lines that this thread is executing. If it executes none, as a thread of autograd does, return
    the lines of the main thread, together with `of`.

    of: the name of the autograd node that this thread is running, e.g. "MulBackward0".
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
