"""Connect the machines of one attempt of a run.

The machines number the ranks, compare their settings, and send each other news while the attempt runs.

Each machine reports failed workers and requests to halt, so that no machine goes on alone. Each sends messages
several times a second; the others treat a silent machine as lost. machines.py decides who joins the next attempt.
"""

from __future__ import annotations

import math
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from meshwise.spec.errors import UsageError, WorkerFailed
from meshwise.spec.exit_codes import AGAIN
from meshwise.spec.words import ranks_text
from meshwise.workers.failure import Failure
from meshwise.workers.heartbeat import Beat, CollectiveCall
from meshwise.workers.store import Meeting

ELSEWHERE = "on another machine:\n"
TELL_TIMEOUT = 3.0  # seconds for the others to learn of a failure before this machine leaves
EVERY = 1.0  # seconds between reports on the ranks of a machine


@dataclass(frozen=True)
class Member:
    """A machine that takes part in an attempt.

    node: the index of the machine.
    name: the name of its launcher, which is new at each start of the launcher.
    size: the number of its workers.
    host, port: the address of its store.
    """

    node: int
    name: str
    size: int
    host: str
    port: int


@dataclass(frozen=True)
class Beginning:
    """The announcement of an attempt by the machine that leads."""

    number: int
    members: tuple[Member, ...]
    port: int
    facts: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, told: Mapping[str, Any]) -> Beginning:
        """Return the announcement that `asdict` converted to these values."""
        return cls(**{**told, "members": tuple(Member(**member) for member in told["members"])})


class Nodes:
    """The machines of one attempt of the run, with the first rank of this machine, the number of all ranks, and the
    address at which rank 0 listens."""

    def __init__(
        self, meeting: Meeting, node_rank: int, nnodes: int, begins: Beginning, listener: socket.socket | None = None
    ) -> None:
        """meeting: the connection to the store in which the launchers meet. node_rank, nnodes: the index of this
        machine, and the number of machines on which the run was started. begins: the leader's announcement of this
        attempt. listener: on the leader, the socket on which rank 0 will serve the process group's store."""
        self._meeting, self.node_rank, self.nnodes, self.listener = meeting, node_rank, nnodes, listener
        self.begins, self.members = begins, begins.members
        at = [member.node for member in self.members].index(node_rank)
        self.me, self.others = self.members[at], [*self.members[:at], *self.members[at + 1 :]]
        self.first_rank = sum(member.size for member in self.members[:at])
        self.size = sum(member.size for member in self.members)
        self.master, self.port = self.members[0].host, begins.port

    @property
    def leads(self) -> bool:
        """Whether this machine is the leader. If so, the other machines communicate through its store."""
        return self.me is self.members[0]

    def set(self, key: str, value: object) -> None:
        """Send a value to the other machines of this attempt."""
        self._meeting.set(f"{self.begins.number}/{key}", value)

    def try_get(self, key: str) -> Any:
        """Return the value that some machine has set under `key`, or None."""
        return self._meeting.try_get(f"{self.begins.number}/{key}")

    def get(self, key: str) -> Any:
        """Wait for the value that some machine sets under `key`, and return it. Raises WorkerFailed if a machine is
        lost."""
        while (told := self.try_get(key)) is None:
            if lost := self.lost():
                raise WorkerFailed(lost.message, exit_code=lost.exit_code, failure=lost)
            time.sleep(0.02)
        return told

    def compare(self, facts: Mapping[str, object]) -> None:
        """Check that these facts are equal on all machines, before workers are started. If they differ, raises
        UsageError on every machine."""
        self.set(f"program/{self.node_rank}", facts)
        first, *others = [self.get(f"program/{member.node}") for member in self.members]
        for member, other in zip(self.members[1:], others, strict=True):
            for name in first:
                if other.get(name) != first[name]:
                    self.leave()
                    raise UsageError(
                        f"machines {self.members[0].node} and {member.node} differ in their {name}: {first[name]} and "
                        f"{other.get(name)}. Start every machine with the same command, except for --node-rank and "
                        "--devices."
                    )

    def lost(self) -> Failure | None:
        """Return the failure of a machine that no longer answers. None if there is no such machine."""
        for member in self.others:
            done = member is not self.members[0] and self.try_get(f"done/{member.node}")  # a finished machine may leave
            if not done and (why := self._why_lost(member)):
                first = sum(m.size for m in self.members[: self.members.index(member)])
                ranks = ranks_text(range(first, first + member.size))
                text = f"machine {member.node} of {self.nnodes} ({ranks}) is lost: {why}."
                return Failure(first, "lost", f"{text} Check its power, network and log.", plain=True, exit_code=AGAIN)
        return None

    def _why_lost(self, member: Member) -> str:
        """Return why a machine is lost, as a text that ends a sentence. An empty string if the machine is not lost."""
        leader = member is self.members[0]
        seconds = self._meeting.silence if leader else self._meeting.silence_of(member.name)
        if seconds is not None:
            gone = seconds == math.inf or (leader and self._meeting.error is not None)
            return "its launcher is gone" if gone else f"it has not answered for {seconds:.1f} s"
        told = self._meeting.try_get(f"machine/{member.node}")
        again = told is not None and told["name"] != member.name
        return "its launcher was started again" if again else ""

    def fail(self, text: str, failure: Failure | None, exit_code: int) -> None:
        """Tell the other machines how this machine failed. The leader, which keeps the store, waits until they know."""
        facts = None if failure is None else asdict(failure)
        self.set(f"failed/{self.node_rank}", {"text": text, "exit_code": exit_code, "failure": facts})
        if self._meeting.silence is None:
            self._meeting.flush(TELL_TIMEOUT)
        if self.leads:
            self._until_all("heard", time.monotonic() + TELL_TIMEOUT)

    def failed_elsewhere(self) -> WorkerFailed | None:
        """Return the error of another machine that has failed. None if no other machine has failed."""
        for member in self.others:
            if told := self.try_get(f"failed/{member.node}"):
                self.set(f"heard/{self.node_rank}", True)
                self._meeting.flush(TELL_TIMEOUT)
                failure = None if told["failure"] is None else Failure(**told["failure"])
                return WorkerFailed(ELSEWHERE + told["text"], exit_code=told["exit_code"], failure=failure)
        return None

    def all_done(self) -> bool:
        """Tell the other machines that this machine's workers are done. Return whether all machines' are."""
        self.set(f"done/{self.node_rank}", True)
        return all(self.try_get(f"done/{member.node}") for member in self.others)

    def leave(self) -> None:
        """Leave the current attempt of the run. The leader keeps the store for all machines, so it first waits until
        all other machines have left or are lost."""
        self.set(f"left/{self.node_rank}", True)
        self._meeting.flush(TELL_TIMEOUT)
        if self.leads:
            self._until_all("left", None)
        self._meeting.close()

    def _until_all(self, what: str, until: float | None) -> None:
        """Wait until every other machine has set the key `what` or the key `left`."""

        def gone(member: Member) -> bool:
            return bool(self._why_lost(member)) or not self._meeting.has_seen(member.name)

        while until is None or time.monotonic() < until:
            if all(gone(m) or self.try_get(f"{what}/{m.node}") or self.try_get(f"left/{m.node}") for m in self.others):
                return
            time.sleep(0.02)


@dataclass(frozen=True)
class RemoteBeat:
    """The state of a rank on another machine, as that machine last reported it."""

    beat: Beat = field(default_factory=Beat)
    silence: float = 0.0
    stopped: bool = False


class FarBeats:
    """Exchanges the states of ranks with the other machines of an attempt, to find the ranks that cause a hang."""

    def __init__(self, nodes: Nodes | None) -> None:
        """nodes: the machines of the attempt. None on one machine, where nothing needs to be exchanged."""
        self._nodes, self._told = nodes, 0.0
        self._heard: dict[int, tuple[Any, float]] = {}
        self._said: dict[int, Any] = {}

    def tell(self, here: Callable[[], Mapping[int, RemoteBeat]]) -> None:
        """Tell the other machines about the ranks of this machine, at most once per EVERY seconds. here: returns their
        states."""
        now = time.monotonic()
        if self._nodes is not None and now - self._told >= EVERY:
            self._told = now
            self._nodes.set(f"beats/{self._nodes.node_rank}", {rank: _plain(far) for rank, far in here().items()})

    def heard(self) -> dict[int, RemoteBeat]:
        """Return the state of each rank on the other machines, as far as these machines have reported it."""
        found = dict[int, RemoteBeat]()
        for node, news in self._of_others("beats"):
            told, at = self._heard.get(node, (None, 0.0))
            if news != told:
                told, at = self._heard[node] = news, time.monotonic()
            found |= {int(rank): _read(one, at) for rank, one in (told or {}).items()}
        return found

    def say(self, text: str) -> None:
        """Make the launchers of the other machines show this text."""
        if self._nodes is not None:
            self._nodes.set(f"hang/{self._nodes.node_rank}", text)

    def news(self) -> Iterator[str]:
        """Yield the texts that other machines have sent with `say` since the last call."""
        for node, text in self._of_others("hang"):
            if text != self._said.get(node):
                self._said[node] = text
                yield f"machine {node}: {text}"

    def _of_others(self, key: str) -> list[tuple[int, Any]]:
        """Return the index of each other machine, and its last value of a key."""
        nodes = self._nodes
        return [] if nodes is None else [(m.node, nodes.try_get(f"{key}/{m.node}")) for m in nodes.others]


def _plain(far: RemoteBeat) -> dict[str, Any]:
    """Convert the state of a silent rank to values for JSON, with the time on this machine's clock."""
    if not far.silence:
        return {}
    last = replace(far.beat, steps=(), recent=far.beat.recent[-1:])
    return asdict(replace(far, beat=last)) | {"sent": time.perf_counter_ns()}


def _read(told: Mapping[str, Any], at: float) -> RemoteBeat:
    """Return the state of a rank that another machine reported at time `at`, with times on this machine's clock."""
    if not told:
        return RemoteBeat()
    since = time.monotonic() - at
    ahead = time.perf_counter_ns() - round(since * 1e9) - told["sent"]
    calls = [
        one and CollectiveCall(**{**one, "at": one["at"] + ahead})
        for one in (*told["beat"]["recent"], told["beat"]["waits_in"])
    ]
    beat = Beat(**{**told["beat"], "recent": calls[:-1], "waits_in": calls[-1]})
    return RemoteBeat(beat, told["silence"] + since, told["stopped"])
