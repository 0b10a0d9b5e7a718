"""Detect a hanging rank, explain it, and end it at a limit.

A rank is silent while it reports no progress (heartbeat.py). Not every silence is a hang: a silent rank may wait for
another rank, and a script may be silent on all ranks as long as it likes. A silence is a hang if it lasts longer than
the present activity of the rank may take. This is checked for

    a rank for which another waits in a collective        in every program
    a rank for which nobody waits, or all ranks at once   only in a job's loop, where each phase is reported

A rank that waits is never blamed before the rank for which it waits. `patience` says how long each activity may take.
In a check, there are too few steps to tell how long a step takes. There, silence counts only while the rank computes
nothing.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from meshwise.spec.words import ranks_text
from meshwise.workers.heartbeat import PEERS, PLAIN, Beat, CollectiveCall, beat_path, read_beat, stack_path
from meshwise.workers.remote_beats import RemoteBeat
from meshwise.workers.stuck import STATES, Idleness, standing, state_of, stuck_child

INTERVAL = 0.25  # seconds between checks
LOST = 0.5  # seconds: silence between two checks counts for at most this, as a stopped launcher misses reports
LEAST = 2.0  # seconds: a shorter silence is ignored
OF_STOPPED = 5.0  # seconds until a stopped process is reported, even if it was compiling or saving
FEW = 5  # steps needed to know how long a step takes
HANG_LIMIT = 60.0
OF_PLAIN = 600.0  # seconds, as in NCCL: lowest limit for programs without meshwise, whose rank 0 may write for minutes
ASKED = "collectives"
"""A message of this kind asks a rank which collectives its device waits for. The launcher sends it (worker.py)."""
NOBODY: Mapping[int, RemoteBeat] = {}
_OF_A_STEP = ("data", "forward", "backward", "optimizer")


@dataclass(frozen=True)
class Hang:
    """A message for the user about a hang.

    over: whether the run must end.
    stalls: False if the message says that a rank goes on.
    """

    rank: int
    text: str
    step: int | None = None
    over: bool = False
    stalls: bool = True


@dataclass(frozen=True)
class Stall:
    """A group of ranks that make no progress, and the ranks that wait for them.

    waiting: the collective in which each waiting rank waits.
    crossed: whether ranks wait for each other in different collectives.
    inside: whether the ranks hang in a collective that all of its ranks have entered.
    """

    ranks: Sequence[int]
    waiting: Mapping[int, CollectiveCall]
    collective: CollectiveCall | None = None
    crossed: bool = False
    inside: bool = False


def patience(beat: Beat, longest: Mapping[str, float], limit: float, *, stopped: bool = False) -> tuple[float, float]:
    """Return after how many seconds without progress a rank is reported, and after how many seconds the run is
    ended."""
    if stopped:
        ask = min(OF_STOPPED, patience(beat, longest, limit)[0])
        return ask, max(limit, ask)
    before = 3 * longest.get(beat.phase, 0.0)
    if beat.phase == "checkpoint" or beat.compiles or len(beat.steps) < FEW:
        ask = 60.0 + before  # time for first steps, compiling or writing
        return ask, max(limit, 600.0, 2 * ask)
    if beat.phase in _OF_A_STEP:
        # The 99th percentile of the step times, tripled, plus 2 s.
        ask = 3 * sorted(beat.steps)[int(0.99 * (len(beat.steps) - 1) + 0.999)] + 2.0
        return ask, max(limit, ask)
    ask = min(30.0, limit / 2) + before  # time for a batch of an evaluation, or for work between steps
    return ask, max(limit, 2 * ask)


def find_stall(beats: Mapping[int, Beat], silent: Collection[int]) -> Stall | None:
    """Find the ranks that cause a hang, and the ranks that wait for them.
    None if there is no hang."""
    waits = {rank: _wait(beats[rank], all_silent=len(silent) == len(beats)) for rank in silent}
    waiting = {rank: wait for rank, wait in waits.items() if wait is not None}
    late = {rank: _late(beats, wait) for rank, wait in waiting.items()}
    waiting = {rank: wait for rank, wait in waiting.items() if late[rank] or not beats[rank].overlaps}
    roots = {rank for ranks in late.values() for rank in ranks} - waiting.keys()
    if roots & set(silent):
        ranks = sorted(roots & set(silent))
        theirs = {rank: waiting[rank] for rank in waiting if late[rank] & set(ranks)}
        return Stall(ranks, theirs, min(theirs.values(), key=lambda wait: wait.at))
    if roots:  # the ranks that the others wait for make progress
        return None
    ours, everyone = all(beat.ours for beat in beats.values()), len(silent) == len(beats)
    stuck = {rank: wait for rank, wait in waiting.items() if not late[rank]}  # all ranks have entered these collectives
    if stuck and (any(late.values()) or (everyone and (ours or len(waiting) == len(beats)))):
        first = min(stuck.values(), key=lambda wait: wait.at)
        return Stall(sorted(rank for rank in stuck if stuck[rank].group == first.group), waiting, first, inside=True)
    if waiting and all(beats[rank].begun for rank in waiting) and any(late.values()):
        return Stall(sorted(waiting), waiting, crossed=True)
    return Stall(sorted(set(silent) - waiting.keys()), waiting) if ours and everyone else None


def _wait(beat: Beat, *, all_silent: bool) -> CollectiveCall | None:
    """Return the collective in which a rank without progress waits, or None if it is unknown."""
    if beat.waits_in is None and beat.overlaps and all_silent:
        return max(beat.recent, key=lambda c: c.at, default=None)
    return beat.waits_in


def _late(beats: Mapping[int, Beat], wait: CollectiveCall) -> set[int]:
    """Return the ranks that a collective still waits for: the ranks of its group that have not entered it."""
    members = _members(wait) & beats.keys()
    if _is_message(wait):
        return members
    return {rank for rank in members if beats[rank].begun.get(wait.group, 0) < wait.number}


def _is_message(collective: CollectiveCall) -> bool:
    """Check whether a call is a send or a receive. The group of such a call consists of the ranks at the other end."""
    return collective.group.endswith(f"/{PEERS}")


def _members(collective: CollectiveCall) -> set[int]:
    return {int(rank) for rank in collective.group.partition("/")[0].split(",") if rank.isdigit()}


class HangWatch:
    """Detects hangs among the ranks of this machine, from the progress that they report."""

    def __init__(self, folder: Path, limit: float | None, *, idle: bool = False) -> None:
        """Begin to watch the ranks that report to the files in `folder`."""
        self._folder, self._limit = folder, limit
        self._idleness = Idleness() if idle else None
        self._looked = time.monotonic()
        self._heard: dict[int, Beat] = {}
        self._silence: defaultdict[int, float] = defaultdict(float)
        self._longest: defaultdict[str, float] = defaultdict(float)
        self._said: set[int] = set()

    def look(self, pids: Mapping[int, int | None], far: Mapping[int, RemoteBeat] = NOBODY) -> Hang | None:
        """Return the next message about a hang, or None if there is nothing new to say."""
        now = time.monotonic()
        if now - self._looked < INTERVAL:
            return None
        passed, self._looked = min(now - self._looked, LOST), now
        went_on = self._listen(pids, passed)
        silent = [rank for rank in pids if self._silence[rank] >= LEAST]
        limit = self._limit or HANG_LIMIT
        if went_on or not silent:
            return went_on
        beats = {rank: each.beat for rank, each in far.items()} | {rank: self._heard[rank] for rank in pids}
        stall = find_stall(beats, [*silent, *(rank for rank, each in far.items() if each.silent)])
        if stall is None and self._idleness is not None and len(silent) == len(beats):
            stall = Stall(silent, {})
        stall = None if stall is None else _of_stopped(stall, [*self._stopped(pids, far)])
        if stall is None or (far and min(stall.ranks) not in pids):
            return None
        first = max([rank for rank in stall.ranks if rank in pids], key=lambda rank: self._silence[rank])
        is_stopped = (pid := pids[first]) is not None and state_of(pid) == "T"
        ask, end = patience(beats[first], self._longest, limit, stopped=is_stopped)
        if any(group.endswith(PLAIN) for group in beats[first].begun):
            end = max(end, OF_PLAIN)
        if self._idleness is not None:
            ask, end = limit / 4, limit
        seconds, step = self._silence[first], beats[first].step or None
        over = self._limit is not None and seconds >= end
        if seconds < ask or (first in self._said and not over):
            return None
        self._said.add(first)
        text = self._explain(stall, beats, pids, seconds)
        if not over:
            return Hang(first, text, step)
        longer = "" if end != self._limit else " To wait longer, use --hang-limit 10min."
        if self._idleness is not None:
            longer = " Every rank must make the same calls in the same order. Look for code that depends on the rank."
        return Hang(first, f"{text} Ended after {end:.0f} s without progress.{longer}", step, over)

    def _listen(self, pids: Mapping[int, int | None], passed: float) -> Hang | None:
        """Add `passed` seconds to the silence of each silent rank. Return a message if a reported rank goes on."""
        went_on = None
        for rank in pids:
            beat, before = read_beat(beat_path(self._folder, rank)), self._heard.get(rank)
            self._heard[rank] = beat
            if before and beat.beats == before.beats and not self._computes(pids[rank]):
                self._silence[rank] += passed
                continue
            seconds = self._silence.pop(rank, 0.0)
            if seconds >= LEAST:
                self._longest[beat.phase] = max(self._longest[beat.phase], seconds)
            if rank in self._said:
                self._said.remove(rank)
                went_on = Hang(rank, f"rank {rank} goes on after {seconds:.1f} s.", stalls=False)
        return went_on

    def _computes(self, pid: int | None) -> bool:
        return self._idleness is not None and self._idleness.computes(pid, self._looked)

    def _explain(self, stall: Stall, beats: Mapping[int, Beat], pids: Mapping[int, int | None], seconds: float) -> str:
        first = beats[stall.ranks[0]]
        step = f" in step {first.step}" if first.step else ""
        told = f"No progress for {seconds:.1f} s{step}: "
        what = [f"rank {rank} {self._where(rank, beats[rank], pids.get(rank))}" for rank in stall.ranks[:3]]
        if stall.crossed:
            each = [f"{text}, in {_named(stall.waiting[rank])}" for rank, text in zip(stall.ranks, what, strict=False)]
            return f"{told}ranks wait for each other in different collectives: {'; '.join(each)}."
        if stall.inside and stall.collective is not None:
            verb = "is" if len(stall.ranks) == 1 else "are"
            inside = f"{ranks_text(stall.ranks)} {verb} in {_named(stall.collective)}"
            told += f"{inside}, and it does not end: check the network between the ranks"
            if first.ours:
                return f"{told}."
            return f"{told}, and whether a rank makes a call that others do not. {'; '.join(what).capitalize()}."
        told += "; ".join(what)
        if stall.waiting:
            wait = min(stall.waiting.values(), key=lambda wait: wait.at)
            ago = (time.perf_counter_ns() - wait.at) / 1e9
            verb = "waits" if len(stall.waiting) == 1 else "wait"
            told += f"; {ranks_text(sorted(stall.waiting))} {verb} for it in {_named(wait)} since {ago:.1f} s"
            for rank in sorted(stall.waiting)[:3]:
                if (pid := pids.get(rank)) is not None:
                    told += f"; rank {rank} {standing(pid, stack_path(self._folder, rank)).told}"
        return f"{told}."

    def here(self, pids: Mapping[int, int | None]) -> dict[int, RemoteBeat]:
        """Return the state of each silent rank of this machine, to be sent to other machines."""
        silent = {rank: pid for rank, pid in pids.items() if self._silence[rank] >= LEAST}
        stopped = set(self._stopped(silent, {}))
        return {rank: RemoteBeat(self._heard[rank], True, rank in stopped) for rank in silent}

    def _stopped(self, pids: Mapping[int, int | None], far: Mapping[int, RemoteBeat]) -> Iterator[int]:
        """Yield the ranks whose process is stopped, or is in uninterruptible sleep."""
        yield from (rank for rank, each in far.items() if each.stopped)
        yield from (rank for rank, pid in pids.items() if pid is not None and state_of(pid) in ("T", "t", "D"))

    def _where(self, rank: int, beat: Beat, pid: int | None) -> str:
        """Return what the rank does and where, such as `is in its phase forward and stands at train.py:31 in loss`."""
        phase = f"is in its phase {beat.phase}" if beat.phase else "has begun no step"
        if pid is None:
            return phase
        own = standing(pid, stack_path(self._folder, rank))
        if self._idleness is not None:
            return own.told
        if beat.phase != "data" or state_of(pid) in STATES:
            return f"{phase} and {own.told}"
        child = stuck_child(pid, stack_path(self._folder, rank))
        beside = "" if child is None else f" (its loader worker, process {child.pid}, {child.told})"
        return f"{phase} and {own.told}{beside}"


def _of_stopped(stall: Stall, stopped: Sequence[int]) -> Stall:
    """Return a stall that blames stopped processes if they hold up a collective that they entered, else `stall`."""
    which = sorted(stall.waiting.keys() & set(stopped)) if stall.inside or stall.crossed else []
    return Stall(which, {rank: at for rank, at in stall.waiting.items() if rank not in which}) if which else stall


def _named(collective: CollectiveCall) -> str:
    if _is_message(collective):
        return collective.name
    return f"{collective.name} (collective {collective.number})"
