"""Describe a race: both accesses, their source lines, and the fix.

Lines of the user's code, of libraries and of meshwise are named. Lines of torch and of Python itself are left out.
"""

from __future__ import annotations

import functools
import sys
import threading
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import NamedTuple

from meshwise.checker.races.checker import Race
from meshwise.checker.races.memory import Access
from meshwise.spec.user_code import OURS, is_users, place
from meshwise.torch_compat.gpu_trace import HOST, Lane

MOST_LINES = 100
LEFT_OUT = (f"{OURS}checker", f"{OURS}torch_compat")
MODES = {"__torch_function__", "_handled"}
"""Functions through which meshwise runs each operator. A `Stack` leaves out the lines of meshwise inside them."""
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
    while frame is not None and len(found) < MOST_LINES:
        file = frame.f_code.co_filename
        if frame.f_code.co_name in MODES and _is_ours(file) and not file.startswith(LEFT_OUT[0]):
            found = [line for line in found if not _is_ours(line.file)]
        elif is_shown(file):
            found.append(Line(file, frame.f_lineno, frame.f_code.co_qualname))
        frame = frame.f_back
    return tuple(found)


def _is_ours(file: str) -> bool:
    return file.startswith(OURS)


@functools.cache
def is_shown(file: str) -> bool:
    """Return whether lines of this file are shown: all except those of torch, of Python and of the race detector."""
    if "-packages/" in file:
        return "-packages/torch/" not in file
    return is_users(file) or (_is_ours(file) and not file.startswith(LEFT_OUT))


@dataclass(frozen=True)
class Finding:
    """A race described in words."""

    sentence: str
    advice: str
    details: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.sentence}. {self.advice}"

    @property
    def text(self) -> str:
        """The finding as text of several lines: what happens, what to write in the program, and the details."""
        return "\n    ".join((f"{self.sentence}.", f"{self.advice}.", *self.details))


class LaneNames:
    """Names of streams, numbered in the order in which they appear."""

    def __init__(self) -> None:
        self._names: dict[Lane, str] = {HOST: "the host"}

    def is_nccls(self, lane: Lane) -> None:
        """Give a stream the name "NCCL's stream", because a process group uses it."""
        self._names[lane] = "NCCL's stream"

    def name(self, lane: Lane, other: Lane = HOST) -> str:
        """Return the name of a stream. The name of its device is left out if the stream `other` has the same device."""
        device, handle = lane
        if lane not in self._names:
            number = 1 + sum(known[0] == device and "stream " in name for known, name in self._names.items())
            self._names[lane] = f"stream {number}" if handle else "the default stream"
        return self._names[lane] + (f" of cuda:{device}" if device not in (HOST[0], other[0]) else "")


def find(race: Race, names: LaneNames) -> Finding:
    """Describe a race in words."""
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
        advice = f"Call stream.wait_stream(other) before it, where stream is {here} and other is {there}"
        if race.recorded is not None:
            early = f"The last event of {there} that {here} waits for was recorded too early, at"
            advice = f"{early} {race.recorded.where.place}. Record an event after {before}, and wait for it"
    return Finding(sentence, advice, (_line_text(act, later), _line_text(did, earlier)))


def _place(access: Access) -> str:
    stack: Stack = access.where
    return stack.place + (f" ({stack.of})" if stack.of else "")


def _line_text(verb: str, access: Access) -> str:
    shown = " < ".join(f"{line} {line.function}" for line in access.where.lines) or access.where.place
    return f"{verb} at {shown} ({access.what})"
