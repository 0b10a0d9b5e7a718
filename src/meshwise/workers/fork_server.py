"""Import torch once and fork the workers of a launch.

    launcher                                     fork server, a child of the launcher
    Forks(preload).server()  starts it    ->     imports what workers need
    .start(...)              a request    ->     forks; the child becomes the worker
    ForkedWorker.poll()      <-    its process id, later its exit status
    .call(function)          a request    ->     forks; the child calls it, and writes its result to a file

The server forks before any code has used a device or started a thread of torch, as CUDA and OpenMP require
(tests/every_import.py); a worker that cannot use its device after the fork is restarted without a fork.
When the launcher dies, the server dies, and with it (PR_SET_PDEATHSIG) every worker.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import cloudpickle

from meshwise.spec import errors
from meshwise.spec.errors import MeshwiseError, WorkerFailed
from meshwise.spec.exit_codes import WARNINGS
from meshwise.workers.channel import CHANNEL
from meshwise.workers.environment import LISTENER
from meshwise.workers.stuck import stat_of

PACKET = 1 << 16
KILL_TIMEOUT = 2.0  # seconds for killed workers to end
CALL = "--call"
LISTENS = "MESHWISE_FORK_SERVER"
"""The environment variable with the address of a fork server that serves many launches, as in the tests of meshwise."""


class Forks:
    """The launcher's side of the fork server, which starts when a launch of workers first needs it. It stays for later
    launches, until `close`, so that only the first launch waits until torch is imported."""

    def __init__(self, preload: Sequence[str]) -> None:
        """preload: modules that the server imports first."""
        self._preload, self._lock = preload, threading.Lock()
        self._known: list[dict[str, int]] = []
        self._line: socket.socket | None = None
        self.process: subprocess.Popen[bytes] | None = None
        """The server's process. None if it has not started, or if this launcher did not start it (see LISTENS)."""

    def server(self, variables: Mapping[str, str]) -> Forks:
        """Start the server, with this environment, if it does not run yet.
        Return this object."""
        if self._line is not None:
            return self
        if address := os.environ.get(LISTENS):
            self._line = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            self._line.connect(address)
            return self
        self._line, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "meshwise.workers", "--fork-server", str(theirs.fileno()), *self._preload],
                env=dict(variables),
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
        return self

    def start(self, arguments: list[str], variables: Mapping[str, str], files: Sequence[int]) -> ForkedWorker:
        """Ask the server for a worker with these arguments and this environment. Return before the worker runs.

        files: the worker's stdout and stderr, its end of the side channel, and on rank 0 the socket of the process
            group's store, as descriptors.
        """
        facts = dict[str, int]()
        with self._lock:
            number = len(self._known)
            self._known.append(facts)
        assert self._line is not None  # the server was started
        request = {"arguments": arguments, "variables": dict(variables), "folder": str(Path.cwd())}
        with os.fdopen(os.memfd_create("request"), "r+b") as file:  # an environment may be larger than a packet
            file.write(json.dumps(request).encode())
            file.flush()
            with contextlib.suppress(OSError):  # `poll` detects a dead server
                socket.send_fds(self._line, [b"%d" % number], [file.fileno(), *files])
        return ForkedWorker(self, facts)

    def call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Call a function in a new process, with this process's stdout and stderr. Return the function's result, which
        must be a value for JSON.

        Raises the MeshwiseError that the function raises. Raises WorkerFailed if the process ends without an answer.
        """
        with tempfile.TemporaryDirectory() as folder:
            task = Path(folder, "call")
            task.write_bytes(cloudpickle.dumps((sys.path, cloudpickle.dumps((function, arguments)))))
            for file in (sys.stdout, sys.stderr):
                file.flush()
            status = self.start([CALL, str(task)], os.environ, [1, 2]).wait()
            try:
                answer = json.loads(answer_of(task).read_text())
            except (OSError, ValueError):
                ended = f"exit code {status}" if status >= 0 else signal.Signals(-status).name
                raise WorkerFailed(f"the process that imports the job's file ended with {ended}.") from None
        if "error" not in answer:
            return answer["value"]
        error: MeshwiseError = getattr(errors, answer["error"])(answer["text"])
        error.exit_code = answer["exit code"]
        raise error

    def hear(self, facts: dict[str, int], *, wait: bool = False) -> dict[str, int]:
        """Return what the server has reported about a worker: `pid` once it is forked, also `status` once it has ended.

        facts: what it had reported before. wait: whether to wait until `status` is known.
        """
        while "status" not in facts:
            try:
                with self._lock:  # another launch may read from this connection too
                    if self._line is not None and not select.select([self._line], [], [], 0.05 if wait else 0)[0]:
                        if wait:
                            continue
                        break
                    packet = b"" if self._line is None else self._line.recv(PACKET)
            except (OSError, ValueError):  # the connection to the server is closed
                packet = b""
            if not packet:  # the server died, so the kernel has killed its workers
                died = None if self.process is None else _waited(self.process)
                facts["status"] = died or -signal.SIGKILL
                break
            told = json.loads(packet)
            self._known[told.pop("number")].update(told)
        return facts

    def end_launch(self, workers: Sequence[ForkedWorker]) -> None:
        """Kill the workers of a launch, and what they have started in their process groups. Close the server if it
        cannot serve another launch."""
        until, ended = time.monotonic() + KILL_TIMEOUT, False
        while not ended and time.monotonic() < until:
            for worker in workers:  # again and again: a newly forked worker may become a group leader only now
                kill_group(worker.pid)
            time.sleep(0.01)
            ended = all("status" in self.hear(worker.facts) for worker in workers)  # a stopped server tells nothing
        if not ended or (self.process is not None and self.process.poll() is not None):
            self.close()

    def close(self) -> None:
        """Kill the server and all processes that it forked. Wait a limited time for them to end."""
        if self._line is None:
            return
        workers = [self.hear(facts).get("pid") for facts in self._known]
        self._line.close()
        if self.process is not None and (None in workers or _waited(self.process) is None):
            self.process.kill()  # a server that still imports, or is stopped, does not notice the closed connection
            for pid in workers:
                kill_group(pid)
            _waited(self.process)
        self._line, self.process, self._known = None, None, []


class ForkedWorker:
    """A forked worker, with the interface of a `subprocess.Popen`."""

    def __init__(self, server: Forks, facts: dict[str, int]) -> None:
        self.server, self.facts = server, facts

    @property
    def pid(self) -> int | None:
        """The process id of the worker. None until the server has forked it."""
        return self.server.hear(self.facts).get("pid")

    def poll(self) -> int | None:
        """Return the worker's exit code, or minus the number of the signal that killed it.
        None while it runs."""
        status, pid = self.server.hear(self.facts).get("status"), self.pid
        if status is None and pid is not None and (fields := stat_of(pid))[:1] == ["Z"]:  # the server may be stopped
            return os.waitstatus_to_exitcode(int(fields[-1]))
        return status

    def wait(self) -> int:
        """Wait until the worker has ended. Return its exit status."""
        return self.server.hear(self.facts, wait=True)["status"]


def serve(line: socket.socket, work: Callable[[], int], interrupted: Any = signal.default_int_handler) -> int:
    """Run the fork server: for each request, fork a process that calls `work`.
    Return the process's exit code."""
    for ignored in (*WARNINGS, signal.SIGINT):
        signal.signal(ignored, signal.SIG_IGN)
    gc.freeze()  # a worker's garbage collector skips imported objects, so their memory pages stay shared
    children: dict[int, int] = {}
    wakes, wake = os.pipe()
    os.set_blocking(wake, False)
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    while True:
        readable = select.select([line.fileno(), wakes], [], [])[0]
        if wakes in readable:
            os.read(wakes, PACKET)
            _tell_ended(line, children)
        if line.fileno() not in readable:
            continue
        try:
            number, files, _, _ = socket.recv_fds(line, PACKET, 5)
        except OSError:
            number = b""
        if not number:
            for pid in children:
                kill_group(pid)
                os.waitpid(pid, 0)
            return 0
        if sys.stdout is not None:  # it is None if the launcher has no stdout
            sys.stdout.flush()
        pid = os.fork()
        if pid == 0:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            signal.signal(signal.SIGINT, interrupted)
            for fd in (line.detach(), wakes, wake):
                os.close(fd)
            _become(files)
            return work()
        children[pid] = int(number)
        for fd in files:
            os.close(fd)
        _tell(line, number=int(number), pid=pid)


def answer_of(task: Path) -> Path:
    """Return the path of the file to which a process started by `Forks.call` writes the result of `task`."""
    return task.with_suffix(".json")


def kill_group(pid: int | None) -> None:
    """Kill a process that leads a process group, and everything that it started in this group. None: no process."""
    if pid is not None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(pid, signal.SIGKILL)


def _waited(process: subprocess.Popen[bytes]) -> int | None:
    """Wait for a process. Return its exit status, or None if it does not end within KILL_TIMEOUT."""
    with contextlib.suppress(subprocess.TimeoutExpired):
        return process.wait(KILL_TIMEOUT)
    return None


def _tell_ended(line: socket.socket, children: dict[int, int]) -> None:
    while children:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid == 0:
            return
        if pid in children:
            _tell(line, number=children.pop(pid), status=os.waitstatus_to_exitcode(status))


def _tell(line: socket.socket, **told: int) -> None:
    with contextlib.suppress(OSError):  # if the launcher is gone, the next read reports it
        line.send(json.dumps(told).encode())


def _become(files: list[int]) -> None:
    """Turn this forked process into the worker: set its session, open files, environment and folder."""
    os.setsid()  # Ctrl-C then reaches only the launcher, which stops all ranks after the same step
    with os.fdopen(files[0], "rb") as file:
        file.seek(0)
        request: dict[str, Any] = json.load(file)
    for fd, at in ((files[1], 1), (files[2], 2)):
        os.dup2(fd, at)
        os.close(fd)
    os.environ.clear()
    os.environ.update(request["variables"])
    for name, fd in zip((CHANNEL, LISTENER), files[3:], strict=False):
        os.environ[name] = str(fd)
    os.chdir(request["folder"])
    sys.argv[1:] = request["arguments"]
    if "numpy" in sys.modules:  # reseed it, or all workers would draw the same (Python's `random` reseeds itself)
        sys.modules["numpy"].random.seed()
