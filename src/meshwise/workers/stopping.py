"""Save and stop on SIGTERM, SIGUSR1 or SIGUSR2, all ranks together.

The state is saved at the end of the step, however often the signals come, and whether they reach one process of a task
or all of them. A rank that reaches no further step is ended after a minute. A process that runs alone and outside a
scheduler is ended by the signals as usual.

With meshwise's launcher, a worker passes the signals to it. Under torchrun or srun, or alone, the ranks agree on the
last step among themselves: a thread of each rank looks in the store for the first request to stop.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import queue
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from meshwise.spec.exit_codes import TIME_LIMIT, WARNINGS, code_of_stop, stop_text, under_scheduler
from meshwise.spec.units import seconds_text
from meshwise.spec.world import World
from meshwise.torch_compat.loaders import spare_loader_workers
from meshwise.torch_compat.reducer import own_connection_to_store
from meshwise.workers.channel import WorkerChannel
from meshwise.workers.gate import StepGate, watch_time

STOP = "meshwise/stop"
ROUND = 0.5  # seconds between checks of the store
LINGER = 10 * ROUND  # longest time that rank 0 waits before it exits, so that the others can read the last step
PATIENCE = 60.0  # seconds for a rank to reach its next step after a request to stop, before it is ended
_over = threading.Event()  # set when the program of this rank has ended
_asked: queue.SimpleQueue[int] = queue.SimpleQueue()
"""Signals that arrived. A handler may run at any point, even while a message is sent, so it only adds to this queue."""


def pass_on(channel: WorkerChannel, gate: StepGate, *, leads: bool) -> None:
    """Report signals to stop, such as SIGTERM, to the launcher. leads: whether to watch the time limit."""
    _catch((*WARNINGS, signal.SIGINT), lambda: gate.interrupting)
    if leads:
        _in_thread(lambda: watch_time(gate, lambda: _asked.put(TIME_LIMIT), _over))
    _in_thread(lambda: channel.send("stop", number=_asked.get()))  # later signals are ignored


def agree_to_stop(world: World, gate: StepGate, *, interrupts: bool = False) -> None:
    """Let a signal to stop, such as SIGTERM, stop all ranks after the same step. Call this in the main thread of a
    process that meshwise's launcher did not start.

    A signal for which the program has its own handler is left to the program. If the process runs alone, outside of a
    scheduler and without `interrupts`, signals end it as usual.
    interrupts: whether Ctrl-C also stops all ranks after the same step.
    """
    first = not _threads
    if world.size == 1 and not interrupts and not under_scheduler():
        return  # the process runs alone: signals end it as usual
    _catch([*WARNINGS, *([signal.SIGINT] if interrupts else [])])
    atexit.register(leave_in_peace)
    if first:
        if world.rank == 0:
            _in_thread(lambda: watch_time(gate, lambda: _asked.put(TIME_LIMIT), _over))
        store = own_connection_to_store() if world.size > 1 else None
        _in_thread(lambda: _ask(store, world, gate, _asked.get()))  # later signals are ignored
        if store is not None:
            _in_thread(lambda: _follow(own_connection_to_store(), world, gate))
            atexit.register(_end, _threads[-1])


def leave_in_peace() -> None:
    """Ignore signals such as SIGTERM from now on, because this process is about to end."""
    if threading.current_thread() is threading.main_thread():
        for number in WARNINGS:
            signal.signal(number, signal.SIG_IGN)


_threads: list[threading.Thread] = []


def _in_thread(work: Callable[[], None]) -> None:
    _threads.append(threading.Thread(target=work, name="meshwise-stopping", daemon=True))
    _threads[-1].start()


def _catch(numbers: Sequence[int], interrupting: Callable[[], bool] = lambda: False) -> None:
    if threading.current_thread() is not threading.main_thread():
        return
    spare_loader_workers()
    owner, came_before = os.getpid(), set[int]()

    def came(number: int, frame: Any) -> None:
        if os.getpid() == owner:
            if number == signal.SIGINT and (number in came_before or interrupting()):
                raise KeyboardInterrupt  # a second Ctrl-C ends the program at once
            came_before.add(number)
            _asked.put(number)
        else:  # this is a child that the program has forked
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

    for number in numbers:
        if signal.getsignal(number) in (signal.SIG_DFL, signal.SIG_IGN, signal.default_int_handler):
            signal.signal(number, came)


def _ask(store: Any, world: World, gate: StepGate, number: int) -> None:
    mine = f"{number} {world.rank}"
    if store is None:
        gate.signal = number
        gate.set_last(gate.freeze())
        _say(number, gate)
    else:
        with contextlib.suppress(RuntimeError):  # rank 0, which hosts the store, may be gone
            if store.compare_set(STOP, "", mine).decode() == mine:
                _say(number, gate)
    if not gate.reached.wait(PATIENCE):  # the rank may never reach another step
        what = f"stopped by {stop_text(number)}: rank {world.rank} did not get to a step in {seconds_text(PATIENCE)}"
        print(f"{what} and is ended.", file=sys.stderr, flush=True)
        os._exit(code_of_stop(number))


def _follow(store: Any, world: World, gate: StepGate) -> None:
    with contextlib.suppress(RuntimeError):  # the store may be gone, if the program has ended
        if _found(store, [STOP], float("inf")):
            gate.signal = int(store.get(STOP).split()[0])
            store.set(f"{STOP}/{world.rank}", str(gate.freeze()))
            keys = [f"{STOP}/{rank}" for rank in range(world.size)]
            if _found(store, keys, PATIENCE):
                gate.set_last(max(int(store.get(key)) for key in keys))
                store.set(f"{STOP}/{world.rank}/read", "")
                if world.rank == 0:  # rank 0 hosts the store, so it must exit after the others have read it
                    _found(store, [f"{key}/read" for key in keys], LINGER, threading.Event())


def _found(store: Any, keys: list[str], seconds: float, over: threading.Event = _over) -> bool:
    """Wait until the store has all keys, for at most `seconds` or until `over` is set.
    Return whether it has them."""
    until = time.monotonic() + seconds
    while not store.check(keys):
        if over.wait(ROUND) or time.monotonic() > until:
            return False
    return True


def _end(follower: threading.Thread) -> None:
    _over.set()
    follower.join(LINGER + ROUND)


def _say(number: int, gate: StepGate) -> None:
    end = "" if gate.saves else "; no state is saved"
    print(f"stopped by {stop_text(number)}: every rank ends after the same step{end}", file=sys.stderr, flush=True)
