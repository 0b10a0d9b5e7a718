"""Let the launchers of one attempt of a run meet.

They meet at torch's TCPStore on machine 0.

    claim      this attempt's name and each machine's index, so that launchers of another start are refused
    compare    the number of devices, the program and its options
    beat       a count twice a second, by which the others know that this machine is alive
    say        values for the others: who failed first, a wish to stop, what a silent rank does

A machine that is silent for SILENCE seconds, or the loss of machine 0, ends the attempt on every machine. Starting
again is the engine's.

Any call of the store may hang for ever on a cut network, so one thread makes all of them. The other threads look at
what it has brought, and at when it last came back. A process that ends while this thread hangs must end by
`os._exit`.

Values are JSON, and a launcher only compares them: no program, path or option comes from the store. If MESHWISE_KEY is
set, each value has a code of this key, and a value without one ends the attempt. SECURITY.md says what stays open.
"""

from __future__ import annotations

import contextlib
import json
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from meshwise.spec.errors import MeshwiseError, WorkerFailed
from meshwise.spec.exit_codes import AGAIN, USAGE
from meshwise.spec.units import seconds_text
from meshwise.spec.words import ranks_text, some
from meshwise.workers.board import Board
from meshwise.workers.failure import Failure
from meshwise.workers.places.place import Place
from meshwise.workers.ports import listening_as
from meshwise.workers.rendezvous import COME, PATIENCE

EVERY, QUICK = 0.5, 0.05  # seconds between exchanges: in a run, and while this machine waits for an answer
SILENCE = 10.0  # seconds without a beat after which a machine is lost
TELL_TIMEOUT = 3.0  # seconds for the others to learn how this machine ends
STOOD = 2.0  # seconds: if this process itself stood still for longer, it hears the others again before it judges them
SAVED = "saved state"  # what machines compare of a run that goes on
ELSEWHERE = "on another machine:\n"


@dataclass
class Machine:
    """What this machine last heard of a machine: its beats, when the last one came, and its values."""

    beats: int = 0
    at: float = 0.0
    version: int = 0
    said: Mapping[str, Any] = field(default_factory=dict)


class Meeting:
    """The machines of one attempt, as the launcher of one of them sees them.

    node, nodes: the index of this machine, and the number of machines.
    first_rank, size: the first rank of this machine, and the number of ranks on all machines.
    master, port: where rank 0 serves the store of the process group. listener: its socket, on machine 0.
    """

    def __init__(self, place: Place, local_size: int) -> None:
        """Begin to meet the launchers at `place.address`. local_size: the number of workers on this machine."""
        assert place.address is not None
        self.place, self.node, self.nodes = place, place.node, place.nodes
        self.master = place.address[0]
        self.first_rank, self.size, self.port = 0, local_size, 0
        self.listener = listening_as(self.master) if self.node == 0 else None
        self._machines = [Machine() for _ in range(self.nodes)]
        self._said: dict[str, Any] = {}
        self._version, self._sent = 0, -1
        self._failed: dict[str, Any] | None = None
        self._verdict: dict[str, Any] | None = None
        self._error: Exception | None = None
        self._met = self._waits = False
        self._heard = self._looked = time.monotonic()
        self._wake, self._over = threading.Event(), threading.Event()
        self.set("size", local_size)
        self.set("port", self.listener.getsockname()[1] if self.listener else 0)
        _threads.append(threading.Thread(target=self._run, name="meshwise-meeting", daemon=True))
        _threads[-1].start()

    def meet(self, limit: float = COME) -> None:
        """Wait until all machines have come, for at most `limit` seconds.

        Raises UsageError if this launcher is refused, WorkerFailed if not all machines come.
        """
        try:
            self._wait_for_all(limit)
        except BaseException:
            self.leave()
            raise
        self.first_rank, self.size = self.ranks_of(self.node)[0], self.ranks_of(self.nodes - 1)[-1] + 1
        self.port = int(self._machines[0].said["port"])

    def _wait_for_all(self, limit: float) -> None:
        began, told = time.monotonic(), False
        while missing := [str(node) for node in range(self.nodes) if self.said(node, "size") is None]:
            who = f"machine {some(missing)} of {self.nodes}"
            waited = time.monotonic() - began
            if waited > PATIENCE and not told and self.node == 0:
                print(f"machine 0 waits for {who}", file=sys.stderr, flush=True)
                told = True
            if self._error is not None:
                raise self._refused(self._error)
            if waited > limit:
                raise WorkerFailed(f"{who} did not come in {seconds_text(limit)}.", exit_code=AGAIN)
            time.sleep(0.02)

    def _refused(self, error: Exception) -> MeshwiseError:
        text = f"the machines cannot meet at {self.master}: {str(error).splitlines()[0]}"
        return error if isinstance(error, MeshwiseError) else WorkerFailed(text, exit_code=AGAIN)

    def compare(self, facts: Mapping[str, object]) -> None:
        """Check that these facts are equal on all machines, before workers are started. If they differ, raises
        WorkerFailed on every machine."""
        self.set("facts", facts)
        first, *others = [self.get(node, "facts") for node in range(self.nodes)]
        for node, other in enumerate(others, 1):
            for name in first:
                if other.get(name) != first[name]:
                    code = AGAIN if name == SAVED else USAGE  # a network disk may show a new state late
                    raise WorkerFailed(
                        f"machines 0 and {node} differ in their {name}: {first[name]} and {other.get(name)}. Start "
                        "every machine with the same command, except for --node-rank and --devices.",
                        exit_code=code,
                    )

    def set(self, name: str, value: object) -> None:
        """Send a value to the other machines."""
        value = json.loads(json.dumps(value))
        if name not in self._said or self._said[name] != value:
            self._said = {**self._said, name: value}
            self._version += 1
            self._machines[self.node].said = self._said
            self._wake.set()

    def said(self, node: int, name: str) -> Any:
        """Return the value that a machine has last set under `name`, or None."""
        return self._machines[node].said.get(name)

    def of_others(self, name: str) -> Iterator[tuple[int, Any]]:
        """Yield each other machine that has set a value under `name`, and the value."""
        for node, machine in enumerate(self._machines):
            if node != self.node and machine.said.get(name) is not None:
                yield node, machine.said[name]

    def get(self, node: int, name: str) -> Any:
        """Wait for the value that a machine sets under `name`, and return it. Raises WorkerFailed if the attempt ends
        before."""
        self._waits = True
        self._wake.set()
        while (told := self.said(node, name)) is None:
            self.look()
            time.sleep(0.02)
        self._waits = False
        return told

    def look(self) -> None:
        """Raise WorkerFailed if another machine has failed or is lost."""
        if (failed := self.failed_elsewhere()) is not None:
            raise failed
        if lost := self.lost():
            raise WorkerFailed(lost.message, exit_code=lost.exit_code, failure=lost)

    def lost(self) -> Failure | None:
        """Return the failure of a machine that no longer answers. None if there is no such machine."""
        now, before = time.monotonic(), self._looked
        self._looked = now
        if now - before > STOOD:
            least = now - SILENCE + STOOD
            self._heard = max(self._heard, least)
            for machine in self._machines:
                machine.at = max(machine.at, least)
        if self._over.is_set():
            return None
        if self._error is not None:
            return self._lost(0, "its launcher is gone")
        if now - self._heard > SILENCE:
            return self._lost(
                0, f"it has not answered for {now - self._heard:.1f} s, or machine {self.node} is cut off"
            )
        for node, machine in enumerate(self._machines):
            if node != self.node and self._met and not machine.said.get("left") and now - machine.at > SILENCE:
                return self._lost(node, f"it has not answered for {now - machine.at:.1f} s")
        return None

    def ranks_of(self, node: int) -> range:
        """Return the ranks of a machine."""
        sizes = [int(machine.said.get("size", 1)) for machine in self._machines]
        return range(sum(sizes[:node]), sum(sizes[: node + 1]))

    def _lost(self, node: int, why: str) -> Failure:
        ranks = self.ranks_of(node)
        text = f"machine {node} of {self.nodes} ({ranks_text(ranks)}) is lost: {why}. Check its power, network and log."
        return Failure(ranks[0], "lost", text, plain=True, exit_code=AGAIN)

    def fail(self, text: str, failure: Failure | None, exit_code: int) -> WorkerFailed:
        """Tell the other machines how this machine has failed. Return the error of the machine that failed first."""
        facts = None if failure is None else asdict(failure)
        self._failed = {"node": self.node, "text": text, "exit_code": exit_code, "failure": facts}
        self._wake.set()
        until = time.monotonic() + TELL_TIMEOUT
        while self._verdict is None and self._error is None and time.monotonic() < until:
            time.sleep(0.01)
        return self.failed_elsewhere() or WorkerFailed(text, exit_code=exit_code, failure=failure)

    @contextlib.contextmanager
    def shared_errors(self) -> Iterator[None]:
        """Tell the other machines about an error that is raised inside the `with` block, and leave the attempt."""
        try:
            yield
        except MeshwiseError as error:
            self.fail(str(error), None, error.exit_code)
            self.leave()
            raise

    def failed_elsewhere(self) -> WorkerFailed | None:
        """Return the error of the machine that failed first. None if none has failed, or if it is this machine."""
        told = self._verdict
        if told is None or told["node"] == self.node:
            return None
        failure = None if told["failure"] is None else Failure(**told["failure"])
        shown = "" if failure is not None and failure.kind == "lost" else ELSEWHERE
        return WorkerFailed(shown + told["text"], exit_code=told["exit_code"], failure=failure)

    def all_done(self) -> bool:
        """Tell the other machines that this machine's workers are done. Return whether all machines' are."""
        self.set("done", True)
        return all(machine.said.get("done") for machine in self._machines)

    def leave(self) -> None:
        """Leave the attempt. Machine 0, whose store goes with it, waits a few seconds for the others to leave."""
        self.set("left", True)
        until = time.monotonic() + TELL_TIMEOUT
        while self._error is None and time.monotonic() < until:
            if self._sent == self._version and (self.node or all(map(self._has_left, self._machines))):
                break
            time.sleep(0.02)
        self._over.set()
        self._wake.set()
        if self.listener is not None:
            self.listener.close()

    def _has_left(self, machine: Machine) -> bool:
        silent = self._met and machine is not self._machines[self.node] and time.monotonic() - machine.at > SILENCE
        return silent or bool(machine.said.get("left"))

    def _run(self) -> None:
        try:
            board = Board(self.place)
            board.claim(self.node)
            while not self._over.is_set():
                self._wake.clear()
                self._exchange(board)
                self._heard = time.monotonic()
                self._wake.wait(QUICK if self._waits or not self._met else EVERY)
        except Exception as error:  # torch raises many kinds; every one means that the store is gone, or not ours
            self._error = error

    def _exchange(self, board: Board) -> None:
        """Send this machine's beat and news, and fetch those of the others."""
        me = self._machines[self.node]
        version, said = self._version, self._said
        if version != self._sent:
            board.set(f"said/{self.node}", said)
        board.set(f"beat/{self.node}", [me.beats + 1, version])
        me.beats, self._sent = me.beats + 1, version
        if self._failed is not None and self._verdict is None:
            board.first("failed", self._failed)
        if self._verdict is None and board.has("failed"):
            self._verdict = board.get("failed")[0]
        come = [node for node, machine in enumerate(self._machines) if machine.beats or board.has(f"beat/{node}")]
        beats = dict(zip(come, board.get(*[f"beat/{node}" for node in come]), strict=True))
        changed = [node for node in come if node != self.node and beats[node][1] != self._machines[node].version]
        told = dict(zip(changed, board.get(*[f"said/{node}" for node in changed]), strict=True)) if changed else {}
        now = time.monotonic()
        self._met = len(come) == self.nodes
        for node in come:
            machine, (count, version) = self._machines[node], beats[node]
            if node != self.node and count > machine.beats:
                machine.beats, machine.at, machine.version = count, now, version
                machine.said = told.get(node, machine.said)


_threads: list[threading.Thread] = []


def hangs() -> bool:
    """Check whether a call of a store has not come back, so that this process must end by `os._exit`."""
    for thread in _threads:
        thread.join(2 * QUICK)
    return any(thread.is_alive() for thread in _threads)
