"""Run a worker process: `python -m meshwise.workers TASK`.

TASK is a file with a pickled function and its arguments. The worker calls the function, puts the result beside TASK,
and reports that it is done, or how it failed. It never imports the launcher's `__main__`.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from multiprocessing.util import get_temp_dir
from pathlib import Path
from typing import Any

import cloudpickle
import torch

from meshwise.spec.devices import threads_in
from meshwise.spec.errors import MeshwiseError, UsageError
from meshwise.spec.world import World
from meshwise.terminal import last_words
from meshwise.torch_compat.driver import lost_by_fork
from meshwise.torch_compat.flight_recorder import GroupProgress, progress
from meshwise.workers import failure, fast_exit, heartbeat, join, stopping, verb_log
from meshwise.workers.channel import WorkerChannel
from meshwise.workers.divergence import trail_path
from meshwise.workers.environment import CORES, DEVICE_KIND, RUN_FOLDER, result_path
from meshwise.workers.failure import Failure
from meshwise.workers.fork_server import CALL, answer_of
from meshwise.workers.hang import ASKED
from meshwise.workers.hints import add_hint
from meshwise.workers.written_files import FileWatch

END_TIMEOUT = 2.0
PR_SET_PDEATHSIG = 1  # from linux/prctl.h
SOCKET_ROOM = 107 - len("/pymp-12345678/listener-12345678")  # bytes of a socket's path that remain for the folder


def main() -> int:
    """Run a worker: bind it to its CPU cores, open its side channel, and run its task.
    Return the exit code."""
    if sys.argv[1] == CALL:
        return answer(Path(sys.argv[2]))
    die_with_parent()
    if cores := os.environ.get(CORES):
        with contextlib.suppress(OSError):
            os.sched_setaffinity(0, {int(core) for core in cores.split(",")})
    threads = threads_in(os.environ)
    if threads not in (
        0,
        torch.get_num_threads(),
    ):  # torch was loaded before the fork, with another number of threads
        torch.set_num_threads(threads)
    session = join.rank_context()
    if session.channel is None:
        raise UsageError("meshwise.workers cannot be started by hand. Use `meshwise run` or `mw.launch`.")
    stopping.pass_on(session.channel, session.gate, leads=session.world.rank == 0)
    task, rank = Path(sys.argv[1]), session.world.rank
    with fast_exit.on_exit(partial(_tell_end, rank, session.channel)):
        code = run_task(task, session.world, session.channel)
    with contextlib.suppress(AttributeError, ValueError):  # the program may have closed stdout
        sys.stdout.flush()
    join.leave()
    return code


def main_of_fork() -> int:
    """Run the worker in a process that the fork server has forked. If the device cannot be used after the fork, start
    Python anew in this process."""
    if DEVICE_KIND in os.environ and lost_by_fork(os.environ[DEVICE_KIND]):
        # The sockets of CHANNEL and LISTENER stay open, since a descriptor that was received is inheritable.
        os.execve(sys.executable, [sys.executable, "-m", "meshwise.workers", *sys.argv[1:]], os.environ)
    return main()


def answer(task: Path) -> int:
    """Call the function of `task` for `Forks.call`. Write its result, or how it failed, to a file. Return 0."""

    if sys.stdout is not None and sys.stderr is not None:
        last_words.watch(sys.stdout, sys.stderr)

    def told(error: MeshwiseError) -> None:
        kind = next(kind.__name__ for kind in type(error).__mro__ if kind.__module__ == MeshwiseError.__module__)
        tell(error=kind, text=str(error), **{"exit code": error.exit_code})

    def tell(**facts: Any) -> None:
        last_words.end_lines()  # so that the launcher's next output starts on a new line
        answer_of(task).write_text(json.dumps(facts))

    with fast_exit.on_exit(lambda call: told(UsageError(fast_exit.OF_COMMAND.format(call=call)))):
        try:
            sys.path[:], pickled = cloudpickle.loads(task.read_bytes())
            function, arguments = cloudpickle.loads(pickled)
            tell(value=function(*arguments))
        except BaseException as error:
            told(failure.of_command(error))
    return 0


def watch_files(channel: WorkerChannel) -> None:
    """From now on, tell the launcher about each file that the user's code writes."""
    records = [os.environ[RUN_FOLDER]] if RUN_FOLDER in os.environ else []
    watch = FileWatch(lambda path, where: channel.send("writes", path=path, where=where), ignored=records)
    torch.save = watch.saving(torch.save)


def die_with_parent() -> None:
    """Let the kernel kill this process when its parent dies, even while this process holds the GIL."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def keep_sockets_in(scratch: Path) -> None:
    """Make loader workers put their sockets for passing tensors into the folder `scratch`."""
    if len(str(scratch)) > SOCKET_ROOM:
        return
    before, tempfile.tempdir = tempfile.tempdir, str(scratch)
    get_temp_dir()  # makes a folder in `scratch`, once for this process and its children
    tempfile.tempdir = before


def prepare(scratch: Path, world: World, channel: WorkerChannel) -> None:
    """Keep sockets in `scratch`. Begin to report verbs, progress and the files written."""
    keep_sockets_in(scratch)
    verb_log.begin(trail_path(scratch, world.rank))
    join.keep_store()
    heartbeat.begin(scratch, world.rank, overlaps=world.kind != "cpu")
    if world.size > 1:
        watch_files(channel)
    if world.kind != "cpu":
        tell_collectives(channel, world.rank)


def tell_collectives(channel: WorkerChannel, rank: int, ask: Callable[[], Sequence[GroupProgress]] = progress) -> None:
    """When the launcher sends the message ASKED, send a line for the user about the collectives that have not ended on
    this rank's device."""

    def tell(message: Mapping[str, Any]) -> None:
        found = [str(each) for each in ask()]
        if found:
            channel.send("note", text=f"rank {rank}, by torch's flight recorder: {'; '.join(found)}.")

    channel.listeners[ASKED] = tell


def run_task(task: Path, world: World, channel: WorkerChannel) -> int:
    """Run the task, and report to the launcher how it ended. Return the exit code of the process."""
    rank = world.rank
    try:
        prepare(task.parent, world, channel)
        paths, pickled = cloudpickle.loads(task.read_bytes())
        sys.path[:] = paths  # before unpickling: the function's module may be only on the launcher's path
        function, arguments = cloudpickle.loads(pickled)
        _save_result(result_path(task, rank), function(*arguments))
    except SystemExit as exit:
        return _exited(exit, rank, channel)
    except BaseException as raised:
        error = raised
        try:
            failure.await_loader_end(raised)
        except RuntimeError as told:
            error = told
        by_stop = isinstance(error, KeyboardInterrupt) or failure.is_communication_error(error)
        if not (by_stop and join.rank_context().gate.halted):
            add_hint(error)
            channel.send("failed", failure=asdict(failure.by_error(rank, error)))
            return 1
        _save_result(result_path(task, rank), None)  # a script that stopped on request has no result
    channel.send("done")
    return 0


def _exited(exit: SystemExit, rank: int, channel: WorkerChannel) -> int:
    if exit.code in (0, None):
        where = "in the middle of an epoch" if verb_log.in_progress else "before the others"
        left = Failure(rank, "left", f"left with exit code 0 {where}", time=time.time())
        channel.send("exited", failure=asdict(left), in_progress=bool(verb_log.in_progress))
        return 0
    failed = failure.by_exit(rank, exit)
    channel.send("failed", failure=asdict(failed))
    return failed.exit_code


def _tell_end(rank: int, channel: WorkerChannel, call: str) -> None:
    text = fast_exit.OF_RANK.format(call=call)
    channel.send("failed", failure=asdict(Failure(rank, "raised", text, time=time.time())))
    time.sleep(END_TIMEOUT)  # the launcher must read this before it sees that the process ended


def _save_result(path: Path, result: Any) -> None:
    try:
        path.write_bytes(cloudpickle.dumps(result))
    except Exception as error:
        raise TypeError(f"the result cannot be sent back: {error}. Return plain values or CPU tensors.") from error
