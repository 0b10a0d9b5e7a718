"""Start one worker per device, watch them, and end them all together.

    prepare    the task file, the side channel, each worker's environment
    start      one process per worker, each leading its own process group
    watch      messages and exit statuses, until every worker is done or one has failed
    end        no worker is left running, whatever happened

A worker that exits without reporting that it is done has failed, whatever its exit code. Elastic agents take exit code
0 for success, and report the process that ended first, which is often a victim. A rank that hangs is reported, and ends
the run at a limit: hang.py. Not covered: restarting workers.
"""

from __future__ import annotations

import os
import queue
import socket
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import cloudpickle

from meshwise.spec.devices import WorkerSlot
from meshwise.spec.errors import WorkerFailed
from meshwise.workers import environment, failure
from meshwise.workers.channel import Line, Message
from meshwise.workers.divergence import DivergenceWatch, divergence, last_verbs
from meshwise.workers.failure import Failure
from meshwise.workers.fork_server import Forks
from meshwise.workers.gate import Halt
from meshwise.workers.hang import ASKED, HangWatch
from meshwise.workers.heartbeat import steps_of
from meshwise.workers.meeting import SILENCE, Meeting
from meshwise.workers.ports import listening
from meshwise.workers.remote_beats import RemoteBeats
from meshwise.workers.scratch import scratch_folder
from meshwise.workers.watched import Listeners, State, WatchedWorker, shown
from meshwise.workers.written_files import WrittenFiles

FOLLOW_TIMEOUT = 3.0  # seconds for the other ranks to leave after one has left in the middle of an epoch
END_TIMEOUT = 10.0  # seconds for a finished worker to exit
HALT_INTERVAL = 0.3  # seconds between two requests to halt, if a worker does not answer
HALT_TIMEOUT = 60.0  # seconds for a halted run to finish its step
OTHERS_TIMEOUT = SILENCE + 2.0  # seconds to wait for other machines to report why a rank here lost its connection


def launch(
    function: Callable[..., Any],
    arguments: tuple[Any, ...],
    slots: Sequence[WorkerSlot],
    *,
    folder: Path | None = None,
    listeners: Listeners | None = None,
    meeting: Meeting | None = None,
    halt: Halt | None = None,
    preload: Sequence[str] | Forks = (),
) -> list[Any]:
    """Call `function(*arguments)` in one worker per slot. Return the results in rank order.

    folder: the run folder, which keeps each worker's output. Without it, the output of ranks 1 and up may be lost.
    preload: modules that are imported once for all workers, or a fork server that serves several launches.

    Raises WorkerFailed if a worker fails, with the rank and the traceback of the worker that caused the failure.
    """
    with scratch_folder() as scratch, ExitStack() as stack:
        forks = preload if isinstance(preload, Forks) else stack.enter_context(closing(Forks(preload)))
        launcher = _Launcher(
            scratch, folder or scratch, listeners or Listeners(), meeting, halt or Halt(), len(slots), forks
        )
        stack.callback(launcher.end)
        task = scratch / "task.pickle"
        # Pickle twice, because the worker needs `sys.path` before it unpickles the function.
        task.write_bytes(cloudpickle.dumps((sys.path, cloudpickle.dumps((function, arguments)))))
        launcher.start(task, slots)
        launcher.watch()
        return [
            cloudpickle.loads(environment.result_path(task, w.rank).read_bytes()) if w.state is State.DONE else None
            for w in launcher.workers
        ]


@dataclass
class _Launcher:
    """The workers of one launch on this machine, and the state of each."""

    scratch: Path
    folder: Path
    listeners: Listeners
    meeting: Meeting | None
    halt: Halt
    local_size: int
    forks: Forks

    def __post_init__(self) -> None:
        scratch, listeners, meeting, local_size = self.scratch, self.listeners, self.meeting, self.local_size
        self.size = meeting.size if meeting else local_size
        self.first_rank = meeting.first_rank if meeting else 0
        self.workers: list[WatchedWorker] = []
        self._inbox: queue.Queue[tuple[int, Message]] = queue.Queue()
        self._divergence = DivergenceWatch(scratch, range(self.first_rank, self.first_rank + local_size))
        self._hangs, self._remote = (
            HangWatch(scratch, listeners.hang_limit, idle=listeners.idle),
            RemoteBeats(meeting),
        )
        self._written = WrittenFiles()
        self._halting: dict[int, int] = {}
        self._last: int | None = None
        self._halted_at, self._asked, self._saves = 0.0, 0.0, False

    def start(self, task: Path, slots: Sequence[WorkerSlot]) -> None:
        listener = self.meeting.listener if self.meeting else listening("127.0.0.1")
        port = self.meeting.port if self.meeting else listener.getsockname()[1] if listener else 0
        for local_rank, slot in enumerate(slots):
            rank = self.first_rank + local_rank
            variables = os.environ | self._environment(rank, local_rank, port, slot)
            log = self.listeners.log(self.folder, rank)
            pipes = [os.pipe(), os.pipe()] if rank == 0 else []
            stdout, stderr = [write for _, write in pipes] or [log.fileno()] * 2
            ours, theirs = socket.socketpair()
            kept = [theirs.fileno(), *([listener.fileno()] if rank == 0 and listener else [])]
            with theirs:
                process = self.forks.server(variables).start([str(task)], variables, [stdout, stderr, *kept])
            entry = WatchedWorker(rank, process, log, Line(ours, partial(self._heard, rank)))
            self.workers.append(entry)
            for name, (read, write) in zip(("stdout", "stderr"), pipes, strict=False):
                os.close(write)
                entry.readers.append(shown(os.fdopen(read, "rb"), name, log, self.listeners.output))
        if listener is not None:
            listener.close()  # rank 0 has its own copy

    def _environment(self, rank: int, local_rank: int, port: int, slot: WorkerSlot) -> dict[str, str]:
        visible = ",".join(map(environment.visible, slot.sees or ([] if slot.index is None else [slot.index])))
        return {
            "RANK": str(rank),
            "WORLD_SIZE": str(self.size),
            "LOCAL_RANK": str(local_rank),
            "LOCAL_WORLD_SIZE": str(self.local_size),
            "MASTER_ADDR": self.meeting.master if self.meeting else "127.0.0.1",
            "MASTER_PORT": str(port),
            **environment.loaded_with(slot),
            environment.VISIBLE: visible,
            environment.DEVICE_KIND: slot.device,
            **({} if self.folder == self.scratch else {environment.RUN_FOLDER: str(self.folder.resolve())}),
            environment.CORES: ",".join(map(str, slot.cores)),
        }

    def watch(self) -> None:
        """Wait until the workers of all machines are done. Raises WorkerFailed as soon as the cause of a failure is
        known."""
        while not self._ended():
            self._deliver_one()
            self._look_at_processes()
            self._look_at_halt()
            self._look_at_machines()
            self._look_at_verbs()
            self._look_at_beats()
            self.listeners.look()
            failures = self._failures()
            if failures and self._settled(failures):
                self._fail(failure.culprit(failures, self.size))

    def _ended(self) -> bool:
        """Check whether this machine's workers have ended, and other machines' workers are done. `end` kills a worker
        that is done but does not exit in time."""
        here = self._over() and all(w.seconds > END_TIMEOUT or w.process.poll() is not None for w in self.workers)
        return here and (self.meeting is None or self.meeting.all_done())

    def _over(self) -> bool:
        """Return True if every worker has ended without a failure: its task is done, or it has exited with code 0."""
        return all(w.state in (State.DONE, State.EXITED) for w in self.workers)

    def _look_at_verbs(self) -> None:
        """Raise WorkerFailed if ranks made different calls, unless a worker has failed or a stop is wanted."""
        if self.halt.wanted or any(w.state is State.FAILED for w in self.workers):
            return
        if text := self._divergence.look(self._in(State.DONE, State.EXITED)):
            self._fail(Failure(self.first_rank, "diverged", text, plain=True))

    def _look_at_beats(self) -> None:
        """Tell the user about a hanging rank, or raise WorkerFailed at its limit."""
        pids = {w.rank: w.process.pid for w in self.workers if w.state is State.RUNNING}
        if self.halt.wanted or None in pids.values():  # a worker may not be forked yet
            return
        hang = self._hangs.look(pids, self._remote.heard())
        self._remote.tell(partial(self._hangs.here, pids))
        if hang and hang.over:
            self._fail(Failure(hang.rank, "hung", hang.text, plain=True, step=hang.step))
        elif hang:
            self.listeners.message(hang.rank, {"kind": "note", "text": hang.text})
            self._remote.say(hang.text)
            for entry in self.workers if hang.stalls else ():
                entry.line.send(ASKED)  # only ranks on an accelerator answer
        for text in self._remote.news():
            self.listeners.message(self.first_rank, {"kind": "note", "text": text})

    def _in(self, *states: State) -> list[int]:
        return [w.rank for w in self.workers if w.state in states]

    def _fail(self, chosen: Failure) -> None:
        ranks = [w.rank for w in self.workers]
        step, done = steps_of(self.scratch, ranks, chosen.rank if chosen.rank in ranks else self.first_rank)
        chosen = replace(chosen, step=chosen.step or (step if chosen.rank in ranks else None), done=done)
        text = failure.sentence(chosen, self.size, [w.failure for w in self.workers if w.failure])
        if chosen.kind in ("killed", "left", "victim"):
            trails = self._divergence.trails()
            last = [last_verbs(trails)] if chosen.kind == "victim" else []
            text = divergence(trails, self._in(State.DONE, State.EXITED)) or "\n".join([text, *last]).rstrip()
        if self.meeting:
            raise self.meeting.fail(text, chosen, max(chosen.exit_code, 1))
        raise WorkerFailed(text, exit_code=max(chosen.exit_code, 1), failure=chosen)

    def _look_at_machines(self) -> None:
        """Check whether another machine has failed, is lost, or asks for a stop, and act on this."""
        if self.meeting is None:
            return
        if failed := self.meeting.failed_elsewhere():
            raise failed
        if lost := self.meeting.lost():
            self._fail(lost)
        if self.halt.wanted:
            self.meeting.set("halt", self.halt.signal)
        for _, number in self.meeting.of_others("halt"):
            self.halt.ask(number)

    def _heard(self, rank: int, message: Message) -> None:
        self._inbox.put((rank, message))

    def _deliver_one(self) -> None:
        try:
            rank, message = self._inbox.get(timeout=0.05)
        except queue.Empty:
            return
        entry = self.workers[rank - self.first_rank]
        kind = message["kind"]
        if kind == "done":
            entry.turn(State.DONE)
        elif kind == "exited":
            entry.turn(State.EXITED, Failure(**message["failure"]))
            entry.in_progress = message["in_progress"]
        elif kind == "failed":
            entry.turn(State.FAILED, Failure(**message["failure"]))
        elif kind == "stop":
            self.halt.ask(int(message["number"]))
        elif kind == "finishes_epoch":
            self._saves = True
        elif kind == "halting":
            self._halting[rank] = int(message["begun"])
        elif kind == "writes":
            if text := self._written.add(rank, **{name: value for name, value in message.items() if name != "kind"}):
                self.listeners.message(rank, {"kind": "note", "text": text})
        else:
            self._saves = self._saves or kind == "stopping"
            self.listeners.message(rank, message)

    def _look_at_processes(self) -> None:
        for entry in self.workers:
            status = entry.process.poll()
            if status is not None and entry.state is State.RUNNING and self._inbox.empty():
                entry.died(status)

    def _failures(self) -> list[Failure]:
        """Return the failures so far."""
        if self._over():
            return []
        failed = any(w.state is State.FAILED for w in self.workers)
        return [
            w.failure for w in self.workers if w.failure and (failed or (w.in_progress and w.seconds > FOLLOW_TIMEOUT))
        ]

    def _settled(self, failures: Sequence[Failure]) -> bool:
        """Return True if the cause is certain: all ranks have reported, or have had enough time to report."""
        waited = max(w.seconds for w in self.workers if w.failure)
        if self.meeting and all(f.kind == "victim" for f in failures):
            return waited > OTHERS_TIMEOUT
        return waited > failure.patience(failures) or not self._in(State.RUNNING)

    def _look_at_halt(self) -> None:
        if self.halt.at_once:
            text = "the run was stopped at once. What was saved before is kept."
            if self.meeting:
                self.meeting.fail(text, None, self.halt.exit_code)
            raise WorkerFailed(text, exit_code=self.halt.exit_code)
        if not self.halt.wanted or self._over():
            return
        now = time.monotonic()
        self._halted_at = self._halted_at or now
        waiting = [w for w in self.workers if w.state is State.RUNNING and w.rank not in self._halting]
        if waiting and now - self._asked > HALT_INTERVAL:  # ask again: a starting worker may have missed the request
            self._asked = now
            for entry in waiting:
                entry.line.send("halt")
        if self._halting and not waiting and self._last is None:
            self._last = self._agreed_last(max(self._halting.values()))
            for entry in self.workers if self._last is not None else ():
                entry.line.send("last", step=self._last)
        if time.monotonic() - self._halted_at > HALT_TIMEOUT and not self._saves:
            raise WorkerFailed(
                f"the workers did not stop within {HALT_TIMEOUT:.0f} s and were ended. What was saved before is kept.",
                exit_code=self.halt.exit_code,
            )

    def _agreed_last(self, here: int) -> int | None:
        """Return the last step that any rank of any machine began. None until all machines have answered."""
        if self.meeting is None:
            return here
        self.meeting.set("begun", here)
        begun = [step for _, step in self.meeting.of_others("begun")]
        return max(here, *begun) if len(begun) == self.meeting.nodes - 1 else None

    def end(self) -> None:
        self.forks.end_launch([w.process for w in self.workers])
        for entry in self.workers:
            entry.process.wait()
            for reader in entry.readers:
                reader.join(timeout=2)
            entry.log.close()
            entry.line.close()
