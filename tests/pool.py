"""Worker pools for the tests: started once, sent many cases. Eight spawned workers would cost 20 seconds a test."""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Client, Connection, Listener, wait
from pathlib import Path
from typing import Any
from unittest.mock import patch

import cloudpickle
import torch
import torch.distributed as dist

from meshwise.parallel.splits.rows_axis import DataAxis
from meshwise.spec.devices import WorkerSlot
from meshwise.torch_compat import compiling
from meshwise.training.process.session import end_sessions
from meshwise.transfer import groups
from meshwise.workers import verb_log
from meshwise.workers.join import join
from meshwise.workers.launch import Halt, launch
from tests.left_over import KEPT

KEY = b"meshwise tests"
STACKS = signal.SIGRTMIN  # writes what each thread of a worker is doing to its file
THREADS = 80  # of a worker, which its process groups keep awake: with more, the pool starts anew
START = 120.0  # seconds in which the workers of a pool must have started


def serve(address: Any) -> None:
    """A worker of a pool: run what it is sent, in the process group of all its workers."""
    session = join()
    torch.set_num_threads(1)
    verb_log.end()  # a case may let ranks diverge
    with Client(address, authkey=KEY) as line, tempfile.NamedTemporaryFile("w") as stacks:
        line.send((session.world.rank, stacks.name, os.getpid()))
        faulthandler.register(STACKS, stacks)
        while True:
            try:
                pickled = line.recv_bytes()
            except EOFError:
                return
            fresh()
            function, arguments = cloudpickle.loads(pickled)
            try:
                answer = (True, function(*arguments))
            except BaseException as error:
                answer = (False, (type(error).__name__, str(error), traceback.format_exc()))
            line.send_bytes(cloudpickle.dumps(answer))


def fresh() -> None:
    """Forget what an earlier case has distributed, and compiled: loops are looked at in another way then."""
    end_sessions()
    for group in [*dist.distributed_c10d._world.pg_map]:
        if group.group_desc == DataAxis.name:  # its threads wake up for ever
            dist.destroy_process_group(group)
    groups.key_of.cache_clear()
    verb_log.in_progress.clear()
    torch.set_default_dtype(torch.float32)
    if compiling.is_used():
        torch._dynamo.reset()


def stacks(file: str, process: int) -> str:
    """What the threads of a worker and of its children, such as loader workers, are doing."""
    with suppress(OSError):
        for one in (process, *map(int, Path(f"/proc/{process}/task/{process}/children").read_text().split())):
            os.kill(one, STACKS)
            time.sleep(0.2)
        return Path(file).read_text()
    return "has ended"


class CaseFailed(Exception):
    """A case raised on some rank: `rank`, `kind` (the exception's name), `text`."""

    def __init__(self, rank: int, kind: str, text: str, trace: str) -> None:
        super().__init__(f"rank {rank}: {trace}")
        self.rank, self.kind, self.text = rank, kind, text


class Pool:
    """`size` workers in one process group. `run` sends a function to all and gives the results in rank order."""

    def __init__(self, size: int, device: str = "cpu", **variables: str) -> None:
        """variables: of the workers' environment."""
        self.size, self._device, self._variables = size, device, variables
        self._lines: list[Connection] = []
        self._places: dict[int, Any] = {}
        self._start()

    def _start(self) -> None:
        with patch.dict(os.environ, self._variables):
            self._start_workers()

    def _start_workers(self) -> None:
        self.error: Exception | None = None
        self._halt = Halt()
        listener = Listener(authkey=KEY, backlog=64)
        indices = [None if self._device == "cpu" else rank for rank in range(self.size)]
        slots = [WorkerSlot(self._device, index, (), 1) for index in indices]
        arguments = (serve, (listener.address,), slots)
        self._thread = threading.Thread(target=self._launch, args=(arguments,), daemon=True, name=KEPT)
        self._thread.start()
        met = threading.Thread(target=self._meet, args=(listener,), daemon=True)
        met.start()
        met.join(START)
        if met.is_alive():
            self._halt.at_once = True
            raise TimeoutError(f"{self.size} workers did not start within {START:.0f} s: {self.error}")
        listener.close()

    def _meet(self, listener: Listener) -> None:
        lines = {}
        for _ in range(self.size):
            line = listener.accept()
            rank, *found = line.recv()
            lines[rank], self._places[rank] = line, found
        self._lines = [lines[rank] for rank in range(self.size)]

    def _launch(self, arguments: Any) -> None:
        try:
            launch(*arguments, halt=self._halt)
        except Exception as error:
            self.error = error

    def run(self, function: Callable[..., Any], *arguments: Any, timeout: float = 120) -> list[Any]:
        module = sys.modules[function.__module__]
        cloudpickle.register_pickle_by_value(module)  # workers cannot import the test's module
        message = cloudpickle.dumps((function, arguments))
        if not self._lines:
            self._start()
        if len([*Path(f"/proc/{self._places[0][1]}/task").iterdir()]) > THREADS:
            self._restart()
        for line in self._lines:
            line.send_bytes(message)
        deadline = time.monotonic() + timeout
        answers: dict[int, tuple[bool, Any]] = {}
        while len(answers) < self.size:
            left = [line for rank, line in enumerate(self._lines) if rank not in answers]
            ready = wait(left, timeout=0.5)  # looking at each again and again would take the workers' cores
            for rank, line in enumerate(self._lines):
                if line in ready:
                    answers[rank] = self._answer(line)
            failed = [(rank, what) for rank, (fine, what) in sorted(answers.items()) if not fine]
            if failed and (len(answers) == self.size or self._others_wait(answers)):
                self._restart()
                rank, what = failed[0]
                raise CaseFailed(rank, *what)
            if time.monotonic() > deadline:
                late = sorted(set(range(self.size)) - set(answers))
                doing = "\n".join(f"rank {rank}: {stacks(*self._places[rank])}" for rank in late)
                self._restart()
                raise TimeoutError(f"ranks {late} did not answer in {timeout} s\n{doing}")
        return [answers[rank][1] for rank in range(self.size)]

    def _answer(self, line: Connection) -> tuple[bool, Any]:
        try:
            answer: tuple[bool, Any] = cloudpickle.loads(line.recv_bytes())
            return answer
        except (EOFError, ConnectionError):  # the case ended its process: killed, or out of memory
            self._thread.join(timeout=10)
            said = f"a worker ended in the middle of a case: {self.error}"
            return False, ("WorkerDied", said, said)

    def _others_wait(self, answers: dict[int, Any]) -> bool:
        """The ranks that have not answered a second after one failed are waiting for it in a collective."""
        time.sleep(1.0)
        return not any(line.poll(0) for rank, line in enumerate(self._lines) if rank not in answers)

    def _restart(self) -> None:
        self.close()
        self._start()

    def close(self) -> None:
        """End the workers. The next `run` starts them again."""
        for line in self._lines:
            line.close()
        self._lines = []
        self._halt.at_once = True
        self._thread.join(timeout=30)
