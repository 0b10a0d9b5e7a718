"""Track a run's machines over its attempts, and which one leads.

Their launchers meet in the store of the first machine, which leads: it announces each attempt and who takes part.
Every machine keeps a store and has told the others its address; if the leader is lost, they meet at the next machine.
A restarted machine asks machine 0, which knows who leads. This module does not decide whether the remaining machines
may go on: both halves of a split network may choose a leader.
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import timedelta
from typing import Any

from meshwise.spec.errors import UsageError, WorkerFailed
from meshwise.workers.channel import listening
from meshwise.workers.nodes import Beginning, Member, Nodes
from meshwise.workers.rendezvous import is_here, listens_at
from meshwise.workers.secret import Secret
from meshwise.workers.store import ROUND, SILENCE, Link, Meeting, Store

RENDEZVOUS_TIMEOUT = timedelta(minutes=10)
REACH_TIMEOUT = 3.0  # seconds to reach another machine's store
MOVE_TIMEOUT = 3 * SILENCE  # seconds for the remaining machines to reach another store
CALL_EVERY = 3.0  # seconds between two messages to machine 0
LEAD_TIMEOUT = 60.0  # seconds to wait for the leader's decision
Look = Callable[[], object]
"""A function that is called again and again during a wait. It ends the wait early by raising an error."""


@dataclass
class Machines:
    """The machines on which the run was started, as this machine sees them. One of them, the leader, decides about each
    attempt.

    nodes: the machines of the current attempt.
    """

    meeting: Meeting
    store: Store
    me: Member
    nnodes: int
    secret: Secret
    rdzv: tuple[str, int] | None = None
    nodes: Nodes = field(init=False)
    _leader: int = 0
    _report: dict[str, Any] | None = None
    _ended: bool = False
    _gone: set[str] = field(default_factory=set)
    """The names of machines that could not be reached when a new leader was chosen."""

    @property
    def leads(self) -> bool:
        """Whether this machine is the leader. If so, all machines communicate through its store."""
        return self._leader == self.me.node

    def _present(self) -> None:
        self.meeting.set(f"machine/{self.me.node}", asdict(self.me))

    def _link(self, address: tuple[str, int]) -> Link:
        return Link(address, self.secret.value, REACH_TIMEOUT)

    def _machine(self, node: int) -> Member | None:
        told = self.meeting.try_get(f"machine/{node}")
        return None if told is None else Member(**told)

    def meet(self, asked: Mapping[str, Any] | None = None) -> Nodes:
        """Wait for all machines, begin the first attempt of the run, and return its machines. If the run has already
        begun, make the other machines stop after a step, and join its next attempt.

        asked: settings that must be equal on all machines. Raises UsageError if the run that this machine joins has
        other settings.

        Raises WorkerFailed if not all machines come in time.
        """
        if self.meeting.try_get("begins") is not None:
            self._join(asked or {})
        else:
            self._present()
            if self.leads:
                self.meeting.set("asked", asked or {})
        until = time.monotonic() + RENDEZVOUS_TIMEOUT.total_seconds()

        def look() -> None:
            if ends := self.meeting.try_get("ends"):
                raise WorkerFailed("the run has ended without this machine.", exit_code=ends["code"])
            if self.meeting.try_get("begins") is None and (told := self.meeting.try_get("moved")):
                self._follow(told, asked or {})
            if self.meeting.error is not None:
                raise WorkerFailed("the machine that leads the run cannot be reached any more, or the run has ended.")
            if self.meeting.try_get("begins") is None and time.monotonic() > until:
                missing = f"not all {self.nnodes} machines connected in {RENDEZVOUS_TIMEOUT.seconds // 60} min"
                raise WorkerFailed(f"{missing}. Start each with its --node-rank.")

        while self.leads and any(self._machine(node) is None for node in range(self.nnodes)):
            look()
            time.sleep(0.02)
        if self.leads:
            members = [member for member in map(self._machine, range(self.nnodes)) if member is not None]
            return self.announce(1, members, {})
        while (begins := self.announced(0)) is None:
            look()
            time.sleep(0.02)
        return self._begin(begins)

    def _follow(self, moved: Mapping[str, Any], asked: Mapping[str, Any]) -> None:
        """Join the run at its new leader."""
        if moved["node"] == self.me.node:  # an entry that this machine left before it was restarted
            return
        try:
            link = self._link((moved["host"], moved["port"]))
        except OSError:  # that machine is lost too: the current leader will call this machine
            return
        self.meeting.close()
        self._leader, self.meeting = int(moved["node"]), Meeting(lambda: link, self.me.name)
        while not self.meeting.heard and self.meeting.error is None:
            time.sleep(0.01)
        self._join(asked)

    def _join(self, asked: Mapping[str, Any]) -> None:
        """Register this machine for the next attempt of a run that is under way."""
        for name, value in (self.meeting.try_get("asked") or {}).items():
            if (own := json.loads(json.dumps(asked.get(name)))) != value:
                raise UsageError(
                    f"the run uses {name} {value}, but this machine was started with {own}. Use the same command on "
                    "every machine, except for --node-rank and --devices."
                )
        print("the run is under way: this machine joins it after the next step that is saved.")
        self._present()

    def joiners(self) -> list[Member]:
        """Return the machines that wait to join the next attempt and have devices for it. Only the leader calls this
        method."""
        return [member for member in self._waiting() if member.size]

    def _waiting(self) -> list[Member]:
        """Return the machines that can be reached, but take no part in the current attempt."""
        taking = {member.name for member in self.nodes.members}
        found = [member for member in map(self._machine, range(self.nnodes)) if member and member.name not in taking]
        return [m for m in found if self.meeting.has_seen(m.name) and self.meeting.silence_of(m.name) is None]

    def _call_back(self) -> None:
        """While this machine leads, tell machine 0 the address of this machine's store, again and again."""
        moved = {"node": self.me.node, "host": self.me.host, "port": self.me.port}
        while self.leads and self.rdzv is not None and not self.meeting.is_over:
            with (
                contextlib.suppress(OSError, ValueError),
                contextlib.closing(self._link(self.rdzv)) as link,
            ):
                link.exchange(self.me.name, {"moved": moved}, 0)
            time.sleep(CALL_EVERY)

    # The methods below run between two attempts.

    def report(self, facts: Mapping[str, Any]) -> None:
        """Report to the leader that the workers of this machine have ended.

        facts: how they ended, and the number of workers that this machine can run (`size`). The leader uses them to
            decide how the run continues.
        """
        self._report = dict(facts)
        if facts["size"] != self.me.size:
            self.me = replace(self.me, size=facts["size"])
            self._present()
        self.nodes.set(f"ended/{self.me.node}", self._report)

    def reports(self, look: Look) -> dict[Member, dict[str, Any]]:
        """Wait for the reports of the attempt's machines, and return them. Lost machines are left out. Only the leader
        calls this method."""
        until = time.monotonic() + MOVE_TIMEOUT

        def lost(member: Member) -> bool:
            now = self._machine(member.node)
            if member.name in self._gone or (now is not None and now.name != member.name):
                return True
            if self.meeting.has_seen(member.name):
                return self.meeting.silence_of(member.name) is not None
            return time.monotonic() > until

        members = self.nodes.members
        while True:
            found = {m: self.nodes.try_get(f"ended/{m.node}") for m in members}
            if all(told is not None or lost(member) for member, told in found.items()):
                return {m: told for m, told in found.items() if told is not None and not lost(m)}
            look()
            time.sleep(0.02)

    def announce(self, number: int, members: Sequence[Member], facts: Mapping[str, Any]) -> Nodes:
        """Begin attempt number `number` with these machines, and return them. The leader has the first ranks. Only the
        leader calls this method."""
        others = sorted((m for m in members if m.node != self.me.node), key=lambda m: m.node)
        own = next(m for m in members if m.node == self.me.node)
        listener = listening(listens_at(alone=self.rdzv is not None and is_here(self.rdzv[0])))
        begins = Beginning(number, (own, *others), int(listener.getsockname()[1]), facts)
        self.meeting.set("begins", asdict(begins))
        self.nodes = Nodes(self.meeting, self.me.node, self.nnodes, begins, listener)
        return self.nodes

    def announced(self, after: int) -> Beginning | None:
        """Return the attempt after number `after` that the leader has announced.
        None if there is none with this machine."""
        told = self.meeting.try_get("begins")
        begins = None if told is None else Beginning.of(told)
        if begins is None or begins.number <= after or all(m.name != self.me.name for m in begins.members):
            return None
        return begins

    def end(self, facts: Mapping[str, Any]) -> None:
        """Announce that the run ends, and how. Only the leader calls this method."""
        if not self._ended:
            self._ended = True
            self.meeting.set("ends", facts)

    def leave(self, code: int) -> None:
        """Leave the run. Machines that wait to join learn that the run has ended. code: the exit code of the run."""
        if self.leads and self._waiting():
            text = "the run has ended without this machine."
            self.end({"text": text, "code": code, "failure": None})
            self.meeting.flush(REACH_TIMEOUT)
            time.sleep(4 * ROUND)
        self.nodes.leave()
        if self.leads:
            self.secret.remove()

    def next(self, look: Look) -> Nodes | dict[str, Any]:
        """Wait until the leader announces how the run continues. Return the machines of the next attempt, or a dict
        that says how the run ends.

        If the leader is lost, the next machine leads. If this machine must lead, return the machines of the last
        attempt, and let the caller decide how the run continues.
        """
        until = time.monotonic() + LEAD_TIMEOUT
        while not self.leads:
            if begins := self.announced(self.nodes.begins.number):
                return self._begin(begins)
            if told := self.meeting.try_get("ends"):
                return dict(told)
            if self.meeting.silence is not None or self.meeting.error is not None or time.monotonic() > until:
                self._move()
                until = time.monotonic() + LEAD_TIMEOUT
            look()
            time.sleep(0.02)
        return self.nodes

    def _begin(self, begins: Beginning) -> Nodes:
        self.nodes = Nodes(self.meeting, self.me.node, self.nnodes, begins)
        return self.nodes

    def _move(self) -> None:
        """Connect to the store of the new leader of the run, after the leader was lost."""
        self.meeting.close()
        self._gone |= {m.name for m in self.nodes.members if m.node == self._leader}
        others = (m for m in self.nodes.members if m.node != self._leader)
        for member in sorted(others, key=lambda m: (m.node < self._leader, m.node)):
            if member.node == self.me.node:
                break
            try:
                link = self._link((member.host, member.port))
            except OSError:
                self._gone.add(member.name)
                continue
            self._meet_at(member.node, link)
            return
        self._meet_at(self.me.node, self.store)

    def _meet_at(self, node: int, store: Store | Link) -> None:
        asked = self.meeting.try_get("asked")
        self.store.forget_gone()
        self._leader, self.meeting = node, Meeting(lambda: store, self.me.name)
        if self.leads:
            self.meeting.set("asked", asked or {})
            threading.Thread(target=self._call_back, name="meshwise-call", daemon=True).start()
        begins = self.nodes.begins
        members = sorted(begins.members, key=lambda m: (m.node != node, m.node))
        self._begin(replace(begins, members=tuple(members)))
        self._present()
        if self._report is not None:
            self.report(self._report)
