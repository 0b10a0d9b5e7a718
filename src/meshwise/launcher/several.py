"""Decide how a run continues, on one machine or several.

On several machines, the leader decides, and the other machines follow.

If machines share the run's folder, the one that claims the next attempt there continues the run (records/claims.py).
Otherwise machine 0, which has the saved states, continues the run. So two halves of a split network never both
continue."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from meshwise.launcher.restarts import Restarts, ended
from meshwise.records import folder as names
from meshwise.records.claims import is_over, newest
from meshwise.records.lock import FolderLock
from meshwise.spec.errors import PlanError, WorkerFailed
from meshwise.spec.exit_codes import AGAIN
from meshwise.spec.units import plural
from meshwise.workers.failure import Failure, culprit
from meshwise.workers.gate import Halt
from meshwise.workers.machines import Look, Machines
from meshwise.workers.nodes import ELSEWHERE, Member, Nodes

JOINED = -1
"""The code of an attempt that was stopped so that a machine can join the run. Launchers send it to each other."""
MINORITY_WAIT = 10.0  # seconds that a minority of the machines waits, so that the majority can claim the next attempt
Reports = dict[Member, dict[str, Any]]


@dataclass
class Alone:
    """The machine of a run on a single machine. It has the same methods as `Several`."""

    size: int
    lock: FolderLock | None = None
    nodes = None
    keeps, node, first_rank, late = True, 0, 0, dict[str, Any]()

    @property
    def world(self) -> int:
        return self.size

    def folder_told(self) -> Mapping[str, Any]:
        """Return an empty mapping, because no other machine announces a run folder."""
        return {}

    def finds(self, folder: Path, told: Mapping[str, Any]) -> None:
        """Do nothing, because no other machine has a run folder."""

    def tell_folder(self, folder: Path, attempt: int) -> None:
        """Do nothing, since there is no other machine to tell."""

    def has_more(self, restarts: Restarts) -> bool:
        return False

    def go_on(self, restarts: Restarts, error: WorkerFailed, size: int, halt: Halt) -> tuple[WorkerFailed, str]:
        """Begin the next attempt.
        Return the last error and a sentence, or raise the error if the run ends."""
        if (last := error if halt.ends else restarts.after(error)) is not None:
            raise last
        try:
            used = restarts.fit(size)
        except PlanError as refused:
            raise ended(error, str(refused), AGAIN) from None
        if used != self.size:
            restarts.moves_to(plural(used, "device"))
        self.size = used
        return error, restarts.next()

    def leave(self, code: int) -> None:
        """Do nothing, because there is no other machine to tell about this."""


@dataclass
class Several:
    """The machines of a run on several machines. The leader is the machine that decides how the run continues."""

    machines: Machines
    shares: bool = True
    lock: FolderLock | None = None
    world: int = 0
    """The number of ranks in the first attempt of the run."""

    @property
    def nodes(self) -> Nodes:
        """The machines of the running attempt."""
        return self.machines.nodes

    @property
    def keeps(self) -> bool:
        """Whether this machine writes the run's record."""
        return self.nodes.leads or not self.shares

    @property
    def node(self) -> int:
        return self.machines.me.node

    @property
    def first_rank(self) -> int:
        """The lowest rank of this machine."""
        return self.nodes.first_rank

    @property
    def size(self) -> int:
        """The number of workers on this machine."""
        return self.nodes.me.size

    @property
    def late(self) -> Mapping[str, Any]:
        """The facts about the run that the leader announced when the current attempt began."""
        return self.nodes.begins.facts

    def folder_told(self) -> Mapping[str, Any]:
        """Return the name of the run's folder and the number of the attempt, as another machine has announced them."""
        told: Mapping[str, Any] = self.late.get("folder") or (self.nodes.get("folder") if self.nodes.node_rank else {})
        return told

    def finds(self, folder: Path, told: Mapping[str, Any]) -> None:
        """Set `shares`: whether `folder` on this machine is the folder that another machine has announced."""
        self.shares = not told or newest(folder) == told["attempt"]

    def tell_folder(self, folder: Path, attempt: int) -> None:
        """Announce the run's folder and the attempt to the machines that wait for them."""
        self.nodes.set("folder", {"name": folder.name, "attempt": attempt})

    def leave(self, code: int) -> None:
        """Tell the other machines that this machine leaves the run. code: the exit code of the run."""
        self.machines.leave(code)

    def has_more(self, restarts: Restarts) -> bool:
        """Return whether a machine is waiting to join the run, and the plan could use it."""
        if not (self.nodes.leads and restarts.resumable and restarts.most):
            return False
        more = sum(member.size for member in self.machines.joiners())
        return more > 0 and restarts.could_use(self.nodes.size + more) > self.nodes.size

    def go_on(self, restarts: Restarts, error: WorkerFailed, size: int, halt: Halt) -> tuple[WorkerFailed, str]:
        """Agree with the other machines on the next attempt, after one has ended. Returns what `Alone.go_on`
        returns."""
        before, look = self.nodes, partial(_look, halt)
        self.machines.report({**_facts(error), "size": size, "stopped": halt.ends})
        told = self.machines.next(look)
        if told is self.nodes and told.begins.number == before.begins.number:
            told = self._decide(restarts, look)
        elif isinstance(told, Nodes):
            restarts.take(told.begins.facts["restarts"])
        if not isinstance(told, Nodes):
            raise _as_seen(told, before)
        news = told.begins.facts
        return _as_seen(news["error"], before), str(news["sentence"])

    def _decide(self, restarts: Restarts, look: Look) -> Nodes | dict[str, Any]:
        """Decide whether the run continues.
        Return the next attempt's machines, or facts about the error."""
        reports = self.machines.reports(look)
        error = _error_of(reports)
        joined = all(report["code"] == JOINED for report in reports.values())
        last = None
        if any(report["stopped"] for report in reports.values()):
            last = error
        elif joined:
            restarts.most += 1  # not a failure, so it must not use up a restart
        else:
            last = restarts.after(error)
        if last is None:
            try:
                members = self._fitting(restarts, reports)
                self._claim(restarts, reports, look)
            except (PlanError, _NotHere) as refused:
                last = ended(error, str(refused), AGAIN)
        if last is not None:
            self.machines.end(_facts(last))
            return _facts(last)
        return self._begin(restarts, error, members)

    def _fitting(self, restarts: Restarts, reports: Reports) -> list[Member]:
        """Return the machines of the next attempt, each with its number of workers."""
        members = [replace(member, size=report["size"]) for member, report in reports.items()]
        members += self.machines.joiners()
        if len(members) < restarts.min_nodes:
            raise PlanError(
                f"Only {plural(len(members), 'machine')} of {len(self.nodes.members)} remained, but the run was "
                f"submitted with --nodes {restarts.min_nodes}. Start the run again."
            )
        left = sum(member.size for member in members)
        used = restarts.fit(left)
        surplus = left - used
        for at in reversed(range(len(members))):
            fewer = min(surplus, members[at].size)
            surplus, members[at] = surplus - fewer, replace(members[at], size=members[at].size - fewer)
        members = [member for member in members if member.size]
        if used != self.nodes.size:
            restarts.moves_to(f"{plural(len(members), 'machine')} with {plural(used, 'device')}")
        return members

    def _claim(self, restarts: Restarts, reports: Reports, look: Look) -> None:
        """Claim the next attempt for this machine.
        Raises _NotHere if this machine may not continue the run."""
        first, before, here = self.machines.me.node == 0, len(self.nodes.members), len(reports)
        if not (first or self.shares):
            raise _NotHere("Machine 0, which has the saved states, is lost: start the run again on all machines.")
        lowest = min(member.node for member in self.nodes.members) in {member.node for member in reports}
        if self.shares and not (2 * here > before or (2 * here == before and lowest)):
            until = time.monotonic() + MINORITY_WAIT
            while time.monotonic() < until and not is_over(restarts.folder, restarts.number):
                look()
                time.sleep(0.1)
        if not names.claim_session(restarts.folder, restarts.number + 1):
            raise _NotHere(f"Other machines continued this run without this machine, as attempt {restarts.number + 1}.")

    def _begin(self, restarts: Restarts, error: WorkerFailed, members: Sequence[Member]) -> Nodes:
        """Begin the attempt that this machine has claimed, and announce it to the other machines."""
        restarts.number, sentence = restarts.number + 1, restarts.next()
        if self.lock is None:  # the machine that held the lock was lost, now or earlier
            self.lock = FolderLock(restarts.folder, claimed=True)
        restarts.keep_plan()  # written before other machines start, because a script's workers read it
        folder = {"name": restarts.folder.name, "attempt": restarts.number}
        facts = {
            "folder": folder,
            "world": self.world,
            "restarts": restarts.told(),
            "sentence": sentence,
            "error": _facts(error),
        }
        return self.machines.announce(self.nodes.begins.number + 1, members, facts)


class _NotHere(Exception):
    """Raised if the run must not continue with this machine. The message says why."""


def _facts(error: WorkerFailed) -> dict[str, Any]:
    """Return a failure as values for JSON, so that one machine can report it to the others."""
    failure = None if error.failure is None else asdict(error.failure)
    return {"text": str(error).removeprefix(ELSEWHERE), "code": error.exit_code, "failure": failure}


def _as_seen(told: Mapping[str, Any], nodes: Nodes) -> WorkerFailed:
    """Return the error that this machine shows for a failure that some machine has reported."""
    failure = None if told["failure"] is None else Failure(**told["failure"])
    here = range(nodes.first_rank, nodes.first_rank + nodes.me.size)
    own = failure is None or failure.rank in here or failure.kind == "lost"
    text = told["text"] if own else ELSEWHERE + told["text"]
    return WorkerFailed(text, exit_code=told["code"], failure=failure)


def _error_of(reports: Reports) -> WorkerFailed:
    """Return the error that ended the attempt."""
    known = [(Failure(**told["failure"]), told) for told in reports.values() if told["failure"] is not None]
    if not known:
        told = next(iter(reports.values()))
        return WorkerFailed(told["text"], exit_code=told["code"])
    chosen = culprit([failure for failure, _ in known])
    told = next(told for failure, told in known if failure is chosen)
    done = [failure.done for failure, _ in known]
    return WorkerFailed(told["text"], exit_code=told["code"], failure=replace(chosen, done=max(chosen.done, *done)))


def _look(halt: Halt) -> None:
    if halt.at_once:
        raise WorkerFailed("the run was stopped at once. What was saved before is kept.", exit_code=halt.exit_code)
