"""Publish a rank's step, phase and collectives where its launcher reads them.

The values are written to a file that is mapped into memory, like the verbs (verb_log.py). A report, called a beat,
writes a few words, without a system call. If a rank stops reporting, hang.py examines it, and asks by a signal for its
Python stack.

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
WARM = 2  # first steps that are not recorded, because they take longer
LONG = ("evaluate", "checkpoint")
"""Phases between two steps. If one of them ran, the time from one step to the next is not recorded in `Beat.steps`."""
BETWEEN = ("data", *LONG)
PEERS = ">"
"""The suffix of the group name of a send or a receive. For a message to or from rank 3, the group name is `3/>`."""
PLAIN = "plain"
"""Suffix of the name of the group of all ranks, in a program that does not call meshwise (it reports few phases)."""
SIGNAL = signal.SIGRTMIN + 9
"""The signal that asks a process to write its Python stack to a file."""


@dataclass(frozen=True)
class CollectiveCall:
    """A collective that a rank has entered."""

    name: str
    group: str
    number: int
    at: int


@dataclass(frozen=True)
class Beat:
    """What a rank last reported about its progress.

    beats: the number of reports.
    ours: whether the rank is in the training loop of a job.
    overlaps: whether collectives run beside other work, as on an accelerator.
    begun: how many collectives the rank has entered, by group.
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
    """Return the path of the file to which a rank reports its progress."""
    return folder / f"beats-{rank}"


def stack_path(folder: Path, rank: int) -> Path:
    """Return the path of the file to which a rank, and the processes that it forked, write their Python stack."""
    return folder / f"stack-{rank}"


def read_beat(path: Path) -> Beat:
    """Return the last report of a rank. Without a report, return an empty `Beat`."""
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
    """Return the step that `rank` is in, or None, and the last step that all `ranks` have finished."""
    beats = {each: read_beat(beat_path(folder, each)) for each in {*ranks, rank}}
    done = min(beat.step - (beat.phase not in BETWEEN) for beat in beats.values())
    here = beats[rank].step + (beats[rank].phase == "data")
    return here or None, max(done, 0)


class Heartbeat:
    """The reports of a rank on its progress, in memory that its launcher can read."""

    def __init__(self, path: Path, *, overlaps: bool = False) -> None:
        self._path = path
        with path.open("w+b") as file:
            file.truncate(8 * WORDS)
            self.words = memoryview(mmap.mmap(file.fileno(), 8 * WORDS)).cast("Q")
        self.words[OVERLAPS] = overlaps
        self.names: dict[str, int] = {}
        self._groups: dict[str, int] = {}  # the index of each group's first word
        self._lock = threading.Lock()  # an overlapped collective ends in another thread
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
        """Report whether this rank is in the training loop of a job (`ours`), and whether its model is compiled."""
        self.words[COMPILES], self.words[OURS] = compiles, ours

    def enter(self, name: str, group: str) -> int:
        """Report that this rank enters a collective of a group. Return a number to pass to `leave`."""
        words, at = self.words, self._groups.get(group) or self._group(group)
        words[at + 1] = number = words[at + 1] + 1
        row = RECENT + 4 * (self._recent % MOST_RECENT)
        self._recent += 1
        words[row + 1], words[row + 2], words[row + 3] = words[at], number, time.perf_counter_ns()
        words[row] = self.names.get(name) or self.name(name)
        words[BEATS] = self.beats = self.beats + 1
        return at

    def leave(self, at: int) -> None:
        """Report that the collective has ended on this rank. at: the number that `enter` returned."""
        words = self.words
        with self._lock:
            words[at + 2] += 1
            words[BEATS] = self.beats = self.beats + 1

    def let_go(self) -> None:
        """Stop reporting in a forked process: write to memory that nobody reads."""
        self.words, self._lock = memoryview(bytearray(8 * WORDS)).cast("Q"), threading.Lock()

    def _group(self, text: str) -> int:
        at = GROUPS + 3 * min(len(self._groups), MOST_GROUPS - 1)  # groups beyond the limit share the last place
        self.words[at] = self.name(text)
        self._groups[text] = at
        return at

    def name(self, text: str) -> int:
        """Return the number that stands for a text in the file. A new text is appended to the file."""
        number = self.names.get(text)
        if number is None:
            with self._path.open("ab") as file:
                file.write(f"{text}\n".encode())
            number = self.names[text] = len(self.names) + 1
        return number


beat: Heartbeat | None = None
"""The heartbeat of this process. None if no meshwise launcher watches this process."""


def begin(folder: Path, rank: int, *, overlaps: bool) -> None:
    """Start to report the progress of this rank to a file in `folder` (see `Heartbeat`)."""
    global beat
    beat = Heartbeat(beat_path(folder, rank), overlaps=overlaps)
    # This signal handler is in C, so it writes the stack even while other code holds the GIL.
    faulthandler.register(SIGNAL, stack_path(folder, rank).open("ab"), all_threads=False)


@contextlib.contextmanager
def watched_loop(*, compiles: bool) -> Iterator[None]:
    """Report that the `with` block is the training loop of a job. In this loop, the launcher regards a long time
    without progress as a hang (see `Heartbeat.loop`).

    compiles: whether the model is compiled, so that the first steps may take long.
    """
    if beat is not None:
        beat.loop(ours=True, compiles=compiles)
    yield
    if beat is not None:
        beat.loop(ours=False, compiles=compiles)


def enter(name: str, group: str) -> int:
    """Report that this rank enters a collective. Return a number to pass to `leave`."""
    return 0 if beat is None else beat.enter(name, group)


def leave(at: int) -> None:
    """Report that the collective has ended. at: the number that `enter` returned."""
    if at and beat is not None:
        beat.leave(at)


def _forked() -> None:
    """Stop the reports in a process that a rank has forked, such as a loader worker."""
    global beat
    if beat is not None:
        beat.let_go()
        beat = None


os.register_at_fork(after_in_child=_forked)
