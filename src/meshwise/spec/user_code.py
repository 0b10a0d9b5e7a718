"""Find the line of user code that called meshwise or a library."""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
import sys
import sysconfig
from collections.abc import Iterable
from pathlib import Path
from types import FrameType, FunctionType
from typing import Any

OURS = str(Path(__file__).parents[1]) + os.sep
_LIBRARIES = tuple({sysconfig.get_path(name) + os.sep for name in ("stdlib", "platstdlib", "purelib", "platlib")})
_TYPED_IN = ("<ipython", "<stdin")  # file names of code that was typed in; other names in <> belong to generated code


@functools.cache
def is_users(filename: str) -> bool:
    """Return True for a file of the user, and False for files of meshwise and of libraries, and for generated code."""
    if filename.startswith("<"):
        return filename.startswith(_TYPED_IN)
    installed = f"{os.sep}site-packages{os.sep}" in filename or f"{os.sep}dist-packages{os.sep}" in filename
    return not (installed or filename.startswith((OURS, *_LIBRARIES)))


def user_frame(frame: FrameType | None = None) -> FrameType | None:
    """Return the innermost frame of user code among `frame` and its callers. None if there is no user code.

    frame: by default, the frame of the function that calls this.
    """
    frame = frame or sys._getframe(1)
    while frame is not None and not is_users(frame.f_code.co_filename):
        frame = frame.f_back
    return frame


def frame_in(file: str) -> FrameType | None:
    """Return the innermost frame on the stack whose file path ends with `file`. None if there is no such frame."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and not frame.f_code.co_filename.endswith(file):
        frame = frame.f_back
    return frame


def place(filename: str, line: int | None) -> str:
    """Format a source line as `train.py:31`, relative to the current folder if the file is inside it."""
    path = Path(filename)
    inside = path.is_absolute() and path.is_relative_to(Path.cwd())
    return f"{path.relative_to(Path.cwd()) if inside else filename}:{line or 0}"


def place_of(function: Any) -> str:
    """Return the source line where a user's function begins, as `train.py:31`. Empty for any other function."""
    code = getattr(function, "__code__", None)
    return place(code.co_filename, code.co_firstlineno) if code is not None and is_users(code.co_filename) else ""


def user_place(frame: FrameType | None = None) -> str:
    """Return the source line of the innermost user code among `frame` and its callers, as `train.py:31`.

    The text is empty if there is no user code.

    frame: by default, the frame of the function that calls this.
    """
    frame = user_frame(frame)
    return "" if frame is None else place(frame.f_code.co_filename, frame.f_lineno)


def user_frames(most: int = 8) -> list[FrameType]:
    """Return the frames of user code in this thread, innermost first, at most `most`."""
    frame, found = user_frame(), list[FrameType]()
    while frame is not None and len(found) < most:
        found.append(frame)
        frame = None if frame.f_back is None else user_frame(frame.f_back)
    return found


def user_lines(most: int = 8) -> tuple[tuple[str, int], ...]:
    """Return (file, line) of each frame of user code in this thread, innermost first, at most `most`."""
    return tuple((frame.f_code.co_filename, frame.f_lineno) for frame in user_frames(most))


def name_line(error: Exception) -> None:
    """Put the line of user code that raised `error` in front of the error's message, such as `train.py:31: `.

    Leave the message as it is if it already names a line of that user's file, or if no user code raised the error.
    """
    at, text = raised_at(error), str(error)
    if at and f"{at.rpartition(':')[0]}:" not in text:
        error.args = (f"{at}: {text}",)


def raised_at(error: BaseException) -> str:
    """Return the innermost line of user code that raised `error`. Empty if no user code did."""
    at, trace = "", error.__traceback__
    while trace is not None:
        name = trace.tb_frame.f_code.co_filename
        at = place(name, trace.tb_lineno) if is_users(name) else at
        trace = trace.tb_next
    return at


def named_outside(things: Iterable[Any]) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Find the global and closure variables used by the user's functions among `things`, and by functions that these
    call. Return pairs (namespace, its used names with their present values). The namespace of a closure is a copy."""
    found: dict[FunctionType, Any] = {}
    left = list(things)
    while left:
        function = left.pop()
        if isinstance(function, FunctionType) and function not in found and is_users(function.__code__.co_filename):
            found[function] = []
            with contextlib.suppress(ValueError):  # a closure variable may have no value yet
                names = inspect.getclosurevars(function)
                outer, inner = dict(names.globals), dict(names.nonlocals)
                found[function] = [(function.__globals__, outer), (inner, dict(inner))]
                left += [*outer.values(), *inner.values()]
    return [pair for pairs in found.values() for pair in pairs]
