"""Describe a race: both accesses, their source lines, and the fix.

Lines of the user's code, of libraries and of meshwise are named. Lines of torch and of Python itself are left out.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import NamedTuple

from meshwise.checker.races.checker import Race
from meshwise.checker.races.memory import Access
from meshwise.checker.races.order import HOST, Lane
from meshwise.spec.user_code import OURS, is_users, place

MOST_FRAMES = 100
LEFT_OUT = (f"{OURS}checker/races", f"{OURS}torch_compat", f"{OURS}checker")
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
    line is first."""

    lines: tuple[Line, ...]
    of: str = ""

    @property
    def place(self) -> str:
        """The innermost line of the stack that is in the user's code or in meshwise."""
        own = (line for line in self.lines if _is_ours(line.file) or is_users(line.file))
        found = next(own, self.lines[0] if self.lines else None)
        return UNSEEN if found is None else str(found)


def stack(of: str = "") -> Stack:
    """Return the source lines that this thread, or else the main thread, is executing."""
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


INDENT = "\n    "


class Tensor(NamedTuple):
    """A tensor that is read or written by an operator."""

    dtype: str
    shape: Sequence[int]
    operator: str

    def __str__(self) -> str:
        return f"{self.dtype} {list(self.shape)}, by {self.operator}"


@dataclass(frozen=True)
class Finding:
    """A race described in words."""

    sentence: str
    advice: str
    details: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.sentence}. {self.advice}."

    @property
    def text(self) -> str:
        """The finding as text of several lines: what happens, what to write in the program, and the details."""
        return INDENT.join((f"{self.sentence}.", f"{self.advice}.", *self.details))


class LaneNames:
    """Names of streams, numbered in the order in which they appear."""

    def __init__(self) -> None:
        self._names: dict[Lane, str] = {HOST: "the host"}

    def is_nccls(self, lane: Lane) -> None:
        """Give a stream the name "NCCL's stream", because a process group uses it."""
        self._names[lane] = "NCCL's stream"

    def name(self, lane: Lane, other: Lane | None = None) -> str:
        """Return the name of a stream."""
        if lane not in self._names:
            number = 1 + sum(known.device == lane.device and "stream " in name for known, name in self._names.items())
            self._names[lane] = f"stream {number}" if lane.stream else "the default stream"
        named = self._names[lane]
        alike = lane == HOST or (other is not None and other.device == lane.device)
        return named if alike else f"{named} of {lane.device}"


def find(race: Race, names: LaneNames, name: str = "") -> Finding:
    """Describe a race in words.

    name: the name of the tensor in the program, or "" if it is unknown.
    """
    earlier, later = race.earlier, race.later
    here, there = names.name(later.lane), names.name(earlier.lane, later.lane)
    before, after = _place(earlier), _place(later)
    did = "wrote" if earlier.writes else "reads"
    act = "writes" if later.writes else "reads"
    if race.freed is not None:
        sentence = f"{after}: {here} {act} memory freed at {race.freed.place}, which {there} {did} at {before}"
        advice = f"Call tensor.record_stream(stream) with {there} before the tensor is freed, or wait for {there} first"
    elif later.lane == HOST:
        sentence = f"{after}: the host {act} what {there} {did} at {before}, and does not wait for it"
        advice = f"Record an event after {before}, and write event.synchronize() before {after}"
    else:
        sentence = f"{after}: {here} {act} what {there} {did} at {before}, without waiting for it"
        advice = _wait(race, here, there, before)
    details = (
        f"{name + ': ' if name else ''}{later.what}",
        _line_text(f"{act} at", later.where),
        _line_text(f"{did} at", earlier.where, f" ({earlier.what.operator})"),
    )
    return Finding(sentence, advice, details)


def _wait(race: Race, here: str, there: str, before: str) -> str:
    if race.recorded is None:
        return f"Call stream.wait_stream(other) before it, where stream is {here} and other is {there}"
    return (
        f"The last event of {there} that {here} waits for was recorded too early, at {race.recorded.where.place}. "
        f"Record an event after {before}, and wait for it"
    )


def _place(access: Access) -> str:
    stack: Stack = access.where
    return stack.place + (f" ({stack.of})" if stack.of else "")


def _line_text(verb: str, stack: Stack, more: str = "") -> str:
    shown = " < ".join(f"{line} {line.function}" for line in stack.lines) or stack.place
    return f"{verb} {shown}{more}"
