"""Find the user's file and line, past meshwise and libraries."""

from __future__ import annotations

import functools
import os
import sys
import sysconfig
from pathlib import Path
from types import FrameType
from typing import Any

OURS = str(Path(__file__).parents[1]) + os.sep
_LIBRARIES = tuple({sysconfig.get_path(name) + os.sep for name in ("stdlib", "platstdlib", "purelib", "platlib")})
_TYPED_IN = ("<ipython", "<stdin")  # where code that lies in no file was written; other names in <> are generated code


@functools.cache
def is_users(filename: str) -> bool:
    """Whether code of this file was written by the user: neither ours, nor a library's, nor generated."""
    if filename.startswith("<"):
        return filename.startswith(_TYPED_IN)
    installed = f"{os.sep}site-packages{os.sep}" in filename or f"{os.sep}dist-packages{os.sep}" in filename
    return not (installed or filename.startswith((OURS, *_LIBRARIES)))


def user_frame(frame: FrameType | None = None) -> FrameType | None:
    """The innermost frame of the user's around `frame`, by default around the caller; None where there is none."""
    frame = frame or sys._getframe(1)
    while frame is not None and not is_users(frame.f_code.co_filename):
        frame = frame.f_back
    return frame


def place(filename: str, line: int | None) -> str:
    """`train.py:31`, from the folder that the program was started in where it lies in it."""
    path = Path(filename)
    inside = path.is_absolute() and path.is_relative_to(Path.cwd())
    return f"{path.relative_to(Path.cwd()) if inside else filename}:{line or 0}"


def place_of(function: Any) -> str:
    """The line in which a function of the user's begins; empty for any other."""
    code = getattr(function, "__code__", None)
    return place(code.co_filename, code.co_firstlineno) if code is not None and is_users(code.co_filename) else ""


def user_place(frame: FrameType | None = None) -> str:
    """The user's line that is running around `frame`, by default in this thread; empty where there is none."""
    frame = user_frame(frame)
    return "" if frame is None else place(frame.f_code.co_filename, frame.f_lineno)


def user_lines(most: int = 8) -> tuple[tuple[str, int], ...]:
    """The user's lines that are running in this thread, from inside out: where a function was called, too."""
    frame, found = user_frame(), list[tuple[str, int]]()
    while frame is not None and len(found) < most:
        found.append((frame.f_code.co_filename, frame.f_lineno))
        frame = None if frame.f_back is None else user_frame(frame.f_back)
    return tuple(found)


def name_line(error: Exception) -> None:
    """Begin the sentence of `error` with the user's line that it was raised in, unless it names one of that file."""
    at, text = raised_at(error), str(error)
    if at and f"{at.rpartition(':')[0]}:" not in text:
        error.args = (f"{at}: {text}",)


def raised_at(error: BaseException) -> str:
    """The user's line that `error` was raised in; empty where there is none."""
    at, trace = "", error.__traceback__
    while trace is not None:
        name = trace.tb_frame.f_code.co_filename
        at = place(name, trace.tb_lineno) if is_users(name) else at
        trace = trace.tb_next
    return at
