"""Keep the process's default engine, from `mw.distribute` to the end.

The engine is the one piece of state that scripts share.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
from collections.abc import Iterator

from meshwise.data.keyed import ExactDraws
from meshwise.engine.engine import Engine
from meshwise.guards.finite_losses import FiniteLosses
from meshwise.guards.registry import attach
from meshwise.guards.replicas import LastLook
from meshwise.guards.unsummed import UnsummedLoops
from meshwise.parallel.mesh import divide_work
from meshwise.process.explain import explain_in_script
from meshwise.process.plan_choice import plan_of_run
from meshwise.recording import plain_program
from meshwise.recording.recording import record_script
from meshwise.spec.errors import LossError
from meshwise.spec.user_code import user_place
from meshwise.timeline.recorder import current
from meshwise.transfer import collectives
from meshwise.workers import hints
from meshwise.workers.environment import EXACT_RANDOM
from meshwise.workers.join import join, rank_context

engines: list[Engine] = []
"""The process's own engine, and those of the open sessions inside it. The last one is the default."""


def default_engine() -> Engine:
    """Return the engine of `mw.distribute` and `mw.backward`. The first call joins the run and begins its records."""
    if not engines:
        _begin()
    return engines[-1]


def _begin() -> None:
    begun = plain_program.end()
    joined = join()
    engines.append(_new())
    hints.explainers.append(_explain)
    foreign = joined.channel is None
    engines[0].recording = begun or record_script(joined.world, foreign=foreign, say=tell)
    engines[0].phases.go_on(current().step)
    atexit.register(_process_ends)


def show(text: str) -> None:
    """Tell the watcher the text that the program's current line shows."""
    watcher = engines[-1].watcher if engines else None
    if watcher is not None:
        watcher.shown(user_place(), text)


def process_engine() -> Engine:
    """Return the engine of the whole process, whichever session is open."""
    default_engine()
    return engines[0]


def has_begun() -> bool:
    """Check whether this process has used a verb of an engine."""
    return bool(engines)


def has_distributed_model() -> bool:
    """Check whether this process has given `mw.distribute` a model."""
    return any(engine.has_applied for engine in engines)


def saves() -> bool:
    """Check whether this process saves the state of its loop, by `mw.checkpoint`."""
    return any(engine.given.loop_states for engine in engines)


@contextlib.contextmanager
def session() -> Iterator[None]:
    """End with the with-block what is distributed inside it: its plan, its guards, its hold on gradients.

    Use it for a sweep in one process, where each run may have its own plan. Without a session everything belongs to the
    process. Models are held by weak references in both cases.
    """
    outer, divided = default_engine(), collectives.dividing()
    collectives.divide_among(None)
    inner = _new()
    if outer.watcher is not None:
        inner.watch(outer.watcher)
    engines.append(inner)
    try:
        yield
    finally:
        engines.remove(inner)
        outer.has_applied |= inner.has_applied
        inner.close()
        collectives.divide_among(divided)


def _explain(error: BaseException) -> None:
    engine = engines[-1]
    explain_in_script(error, engine.world, engine.plan, [*engine.program.models])


def program_ends() -> None:
    """Report what can only be known at the end of the program."""
    for engine in engines:
        if (loops := engine.events.find(UnsummedLoops)) is not None:
            loops.finish()
        engine.given.close()
        if engine.watcher is None and not _failed() and not engine.gate.halted:
            engine.carried.finish()
            if (replicas := engine.events.find(LastLook)) is not None:
                replicas.program_ends()
            if (losses := engine.events.find(FiniteLosses)) is not None:
                losses.program_ends()


def _process_ends() -> None:
    """Call `program_ends` at exit, if nobody has: then an error can no longer be the exit code."""
    try:
        program_ends()
    except LossError as error:
        tell(str(error))


def _failed() -> bool:
    """Check whether the program ends by an error, or by an exit code of its own."""
    error = sys.exc_info()[1]
    clean = error is None or (isinstance(error, SystemExit) and error.code in (0, None))
    return not clean or hasattr(sys, "last_type")


def end_sessions() -> None:
    """Close the default engine and all sessions inside it: what is distributed afterwards begins anew."""
    while engines:
        engines.pop().close()
    collectives.divide_among(None)


@contextlib.contextmanager
def apart() -> Iterator[Engine]:
    """Yield a default engine for a program that is rehearsed in this process, whose own engine is set aside."""
    before, divided = engines[:], collectives.dividing()
    engines.clear()
    collectives.divide_among(None)
    try:
        yield default_engine()
    finally:
        end_sessions()
        engines[:] = before
        collectives.divide_among(divided)


def _new() -> Engine:
    joined = join()
    exact = os.environ.get(EXACT_RANDOM, "0") not in ("", "0")
    plan = plan_of_run(joined.world)
    world = joined.world if plan is None or joined.world.size == 1 else divide_work(plan, joined.world)
    return attach(Engine(world, joined.gate, tell, draws=ExactDraws() if exact else None, script=True))


def tell(text: str) -> None:
    """Show the user a line, through the launcher where there is one."""
    channel = rank_context().channel
    if channel is not None:
        channel.send("note", text=text)
    else:
        print(text, file=sys.stderr, flush=True)
