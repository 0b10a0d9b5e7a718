"""Publish a rank's step, phase and collectives where its launcher reads them.

They lie in a file that is mapped into memory, as do the verbs (verb_log.py): a beat writes a few words, without a
system call. hang.py looks at a rank that beats no more, and asks by a signal for its Python stack.

    words     of 8 bytes each: first the single values BEATS to TIMED, then the arrays
    steps     durations of the newest steps, in ns
    groups    for each group of ranks: its name, how many collectives this rank has entered, and how many have ended
    recent    the newest collectives: name, group, number in the group, time of the call
    names     behind the words, one text per line; a word refers to a text by its line number, from 1
"""

from __future__ import annotations

import contextlib
import faulthandler
import mmap
import os
import signal
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

BEATS, STEP, PHASE, OURS, COMPILES, OVERLAPS, TIMED = range(7)
STEPS, MOST_STEPS = 8, 256
GROUPS, MOST_GROUPS = STEPS + MOST_STEPS, 64
RECENT, MOST_RECENT = GROUPS + 3 * MOST_GROUPS, 64
WORDS = RECENT + 4 * MOST_RECENT
WARM = 2  # the first steps of a process are no measure of the others
LONG = ("evaluate", "checkpoint")
"""Phases between two steps: if one occurs, the time from step to step is not recorded as a step's duration."""
BETWEEN = ("data", *LONG)
PEERS = ">"
"""Suffix of a group's name for a send or a receive; such a group consists of the ranks at the other end."""
PLAIN = "plain"
"""Suffix of the name of the group of all ranks in a program that uses none of our verbs, so has hardly any phases."""
SIGNAL = signal.SIGRTMIN + 9 if hasattr(signal, "SIGRTMIN") else None
"""The signal that asks a process to write its Python stack to a file."""


@dataclass(frozen=True)
class CollectiveCall:
    """A collective that a rank has entered. number: its number in its group. at: time of the call (perf_counter_ns)."""

    name: str
    group: str
    number: int
    at: int


@dataclass(frozen=True)
class Beat:
    """The last report of a rank. ours: its loop is that of a job. overlaps: it runs ahead of its accelerator, so that a
    collective ends for it as soon as it has entered it. steps: seconds of the newest steps.

    begun: by group, how many collectives the rank has entered. waits_in: the oldest collective that has not ended.
    """

    beats: int = 0
    step: int = 0
    phase: str = ""
    ours: bool = False
    compiles: bool = False
    overlaps: bool = False
    steps: Sequence[float] = ()
    begun: dict[str, int] = field(default_factory=dict)
    waits_in: CollectiveCall | None = None
    recent: Sequence[CollectiveCall] = ()


def beat_path(folder: Path, rank: int) -> Path:
    """Return the path of the file to which a rank writes its heartbeat."""
    return folder / f"beats-{rank}"


def stack_path(folder: Path, rank: int) -> Path:
    """Return the file to which the rank, and processes that it forked, write their Python stack."""
    return folder / f"stack-{rank}"


def read_beats(path: Path) -> int:
    """Return a number that changes each time the rank beats; 0 before the first beat."""
    try:
        with path.open("rb") as file:
            return int.from_bytes(file.read(8), "little")
    except OSError:
        return 0


def read_beat(path: Path) -> Beat:
    """Read the last report of the rank."""
    try:
        data = path.read_bytes()
    except OSError:
        data = b""
    if len(data) < 8 * WORDS:
        return Beat()
    words = memoryview(data)[: 8 * WORDS].cast("Q").tolist()
    names = ["", *data[8 * WORDS :].decode(errors="replace").split("\n")]
    groups = [words[at : at + 3] for at in range(GROUPS, RECENT, 3) if words[at]]
    over = {names[name]: ended for name, _, ended in groups}
    rows = [words[at : at + 4] for at in range(RECENT, WORDS, 4) if words[at]]
    recent = [CollectiveCall(names[name], names[group], number, at) for name, group, number, at in rows]
    return Beat(
        words[BEATS],
        words[STEP],
        names[words[PHASE]],
        bool(words[OURS]),
        bool(words[COMPILES]),
        bool(words[OVERLAPS]),
        [nanoseconds / 1e9 for nanoseconds in words[STEPS : STEPS + min(words[TIMED], MOST_STEPS)]],
        {names[name]: begun for name, begun, _ in groups},
        min((c for c in recent if c.number > over.get(c.group, 0)), key=lambda c: c.at, default=None),
        recent,
    )


def steps_of(folder: Path, ranks: Iterable[int], rank: int) -> tuple[int | None, int]:
    """Return the step that `rank` is in, None before the first; and the last step that all `ranks` have finished."""
    beats = {each: read_beat(beat_path(folder, each)) for each in {*ranks, rank}}
    done = min(beat.step - (beat.phase not in BETWEEN) for beat in beats.values())
    here = beats[rank].step + (beats[rank].phase == "data")
    return here or None, max(done, 0)


class Heartbeat:
    """A rank's end: reports what the rank does."""

    def __init__(self, path: Path, *, overlaps: bool = False) -> None:
        self._path = path
        with path.open("w+b") as file:
            file.truncate(8 * WORDS)
            self.words = memoryview(mmap.mmap(file.fileno(), 8 * WORDS)).cast("Q")
        self.words[OVERLAPS] = overlaps
        self.names: dict[str, int] = {}
        self._groups: dict[str, int] = {}  # where each lies in the words
        self._lock = threading.Lock()  # a sum that overlaps ends in a thread of its own
        self.beats = self._recent = self._step = self._began = self._timed = 0

    def phase(self, kind: str) -> None:
        """Report that this rank enters a phase."""
        words = self.words
        words[PHASE] = self.names.get(kind) or self.name(kind)
        words[BEATS] = self.beats = self.beats + 1
        if kind in LONG:
            self._began = 0

    def step(self, number: int) -> None:
        """Report that this rank begins a step."""
        now, words = time.perf_counter_ns(), self.words
        if self._began and number == self._step + 1:
            self._timed += 1
            if self._timed > WARM:
                words[STEPS + (self._timed - WARM - 1) % MOST_STEPS] = now - self._began
                words[TIMED] = self._timed - WARM
        words[STEP] = self._step = number
        self._began = now
        words[BEATS] = self.beats = self.beats + 1

    def loop(self, *, ours: bool, compiles: bool) -> None:
        """Report whether this rank's loop is that of a job, in which only phases take long. compiles: the first
        steps may take long too."""
        self.words[COMPILES], self.words[OURS] = compiles, ours

    def enter(self, name: str, group: str) -> int:
        """Report that this rank enters a collective of a group; pass the result to `leave`."""
        words, at = self.words, self._groups.get(group) or self._group(group)
        words[at + 1] = number = words[at + 1] + 1
        row = RECENT + 4 * (self._recent % MOST_RECENT)
        self._recent += 1
        words[row + 1], words[row + 2], words[row + 3] = words[at], number, time.perf_counter_ns()
        words[row] = self.names.get(name) or self.name(name)
        words[BEATS] = self.beats = self.beats + 1
        return at

    def leave(self, at: int) -> None:
        """Report that the collective has ended on this rank."""
        words = self.words
        with self._lock:
            words[at + 2] += 1
            words[BEATS] = self.beats = self.beats + 1

    def let_go(self) -> None:
        """In a forked process, stop reporting: write to memory that nobody reads from now on."""
        self.words, self._lock = memoryview(bytearray(8 * WORDS)).cast("Q"), threading.Lock()

    def _group(self, text: str) -> int:
        at = GROUPS + 3 * min(len(self._groups), MOST_GROUPS - 1)  # more groups than that share the last place
        self.words[at] = self.name(text)
        self._groups[text] = at
        return at

    def name(self, text: str) -> int:
        """Return the number that stands for a text, which is written to the file if it is new."""
        number = self.names.get(text)
        if number is None:
            with self._path.open("ab") as file:
                file.write(f"{text}\n".encode())
            number = self.names[text] = len(self.names) + 1
        return number


beat: Heartbeat | None = None
"""The heartbeat of this process; None if no launcher of ours watches it."""


def begin(folder: Path, rank: int, *, overlaps: bool) -> None:
    """Start this process's heartbeat, and let it write its Python stack to a file on SIGNAL."""
    global beat
    beat = Heartbeat(beat_path(folder, rank), overlaps=overlaps)
    if SIGNAL is not None:
        # Written in the signal's handler, in C: also while other code holds Python's lock.
        faulthandler.register(SIGNAL, stack_path(folder, rank).open("ab"), all_threads=False)


@contextlib.contextmanager
def watched_loop(*, compiles: bool) -> Iterator[None]:
    """Mark the `with` block as the loop of a job, whose phases show its progress."""
    if beat is not None:
        beat.loop(ours=True, compiles=compiles)
    yield
    if beat is not None:
        beat.loop(ours=False, compiles=compiles)


def enter(name: str, group: str) -> int:
    """Report that this rank enters a collective; pass the result to `leave`."""
    return 0 if beat is None else beat.enter(name, group)


def leave(at: int) -> None:
    """Report that the collective has ended."""
    if at and beat is not None:
        beat.leave(at)


def _forked() -> None:
    """Stop beating in a process that a rank forks, such as a loader worker, since that process is no rank."""
    global beat
    if beat is not None:
        beat.let_go()
        beat = None


os.register_at_fork(after_in_child=_forked)
