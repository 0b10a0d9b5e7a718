"""Describe a race: both accesses, their source lines, and the fix."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from meshwise.races.checker import Race
from meshwise.races.memory import Access
from meshwise.races.order import HOST, Lane
from meshwise.races.stacks import Stack

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
    """A race described in words.

    sentence: what happens.
    advice: what to write in the program.
    details: the tensor, and the source lines of both accesses.
    """

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
    """Names of streams, which are numbered in the order in which they appear."""

    def __init__(self) -> None:
        self._names: dict[Lane, str] = {HOST: "the host"}

    def is_nccls(self, lane: Lane) -> None:
        """Give a stream the name "NCCL's stream", because a process group uses it."""
        self._names[lane] = "NCCL's stream"

    def name(self, lane: Lane, other: Lane | None = None) -> str:
        """Return the name of a stream.

        The name of its device is added unless the stream `other` is on the same device.
        """
        if lane not in self._names:
            number = 1 + sum(known.device == lane.device and "stream " in name for known, name in self._names.items())
            self._names[lane] = f"stream {number}" if lane.stream else "the default stream"
        named = self._names[lane]
        alike = lane == HOST or (other is not None and other.device == lane.device)
        return named if alike else f"{named} of {lane.device}"


def find(race: Race, names: LaneNames, name: str = "") -> Finding:
    """Describe a race in words. name: the name of the tensor in the program, or "" if it is unknown."""
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
        _lines(f"{act} at", later.where),
        _lines(f"{did} at", earlier.where, f" ({earlier.what.operator})"),
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


def _lines(verb: str, stack: Stack, more: str = "") -> str:
    shown = " < ".join(f"{line} {line.function}" for line in stack.lines) or stack.place
    return f"{verb} {shown}{more}"
