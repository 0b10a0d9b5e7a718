"""Keep the process's default engine, from `mw.distribute` to the end.

The engine is the only state that the functions of a script's loop share.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
from collections.abc import Iterator
from importlib import import_module

from meshwise import parallel
from meshwise.reports.recorder import current
from meshwise.spec.errors import LossError
from meshwise.spec.user_code import user_place
from meshwise.training import process, recording
from meshwise.training.data.keyed import ExactDraws
from meshwise.training.engine.engine import Engine
from meshwise.training.guards.registry import attach
from meshwise.training.process.plan_choice import plan_of_run
from meshwise.transfer import collectives
from meshwise.workers import hints
from meshwise.workers.environment import EXACT_RANDOM, RUN_FOLDER
from meshwise.workers.join import join, rank_context

RAY = "ray.train", "meshwise.integrations.ray"
"""A module of Ray, and the module that is told of a loop in its workers."""
engines: list[Engine] = []
"""The engine of the process, followed by the engines of the open sessions. The last one is the default engine."""


sized: list[str] = []
"""Lines of the program that have read the number of ranks, which a program that sees whole batches should not
need."""


def default_engine() -> Engine:
    """Return the engine that `mw.distribute` and `mw.backward` use. The first call joins the run and starts its
    recording."""
    if not engines:
        _begin()
    return engines[-1]


def _begin() -> None:
    watched = f"{recording.__name__}.plain_program" in sys.modules
    begun = recording.plain_program.end() if watched else None
    joined = join()
    engines.append(_new())
    hints.explainers.append(_explain)
    foreign = joined.channel is None
    if begun is None and RUN_FOLDER in os.environ:
        begun = recording.recording.record_script(joined.world, foreign=foreign, say=tell)
    if begun is not None:
        engines[0].ends.callback(begun.close)
    engines[0].phases.steps = current().step
    atexit.register(_process_ends)
    if RAY[0] in sys.modules:
        import_module(RAY[1]).begin(engines[0])


def show(text: str) -> None:
    """Tell the engine's listeners that the program prints or logs a text at the user's current line."""
    if engines:
        engines[-1].events.send("shown", user_place(), text)


def process_engine() -> Engine:
    """Return the engine of the whole process, even inside an open session."""
    default_engine()
    return engines[0]


def has_begun() -> bool:
    """Check whether this process has called a function that needs an engine, such as `mw.distribute`."""
    return bool(engines)


def has_distributed_model() -> bool:
    """Check whether this process has passed a model to `mw.distribute`."""
    return any(engine.has_applied for engine in engines)


def saves() -> bool:
    """Check whether this process saves the state of its training loop with `mw.checkpoint`."""
    return any(engine.given.loop_states for engine in engines)


@contextlib.contextmanager
def session() -> Iterator[None]:
    """Limit the effect of `mw.distribute` to the `with` block: its plan, its checks and its gradient hooks. Use it for
    a sweep in one process, where each run may have a different plan.

    Without a session, the effect lasts until the process ends. With or without a session, meshwise holds models by weak
    references, so that the program can free them.
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
    if (engine := engines[-1]).program.models:
        process.explain.explain_in_script(error, engine.world, engine.plan)


def program_ends() -> None:
    """Run the checks for the end of the program. Raises LossError if a check fails."""
    for engine in engines:
        engine.events.send("evaluations_end")
        engine.given.close()
        if engine.watcher is None and not _failed() and not engine.gate.halted:
            engine.notify("" if engine.draws is None else engine.draws.note())
            engine.carried.finish()
            engine.events.send("program_ends")


def _process_ends() -> None:
    """Call `program_ends` at exit. Leave open loops first, while Python can still run their code."""
    for loop in [loop for engine in engines for loop in engine.given.loops]:
        loop.close()
    try:
        program_ends()
    except LossError as error:
        tell(str(error))


def _failed() -> bool:
    """Check whether the program ends with an exception or a non-zero exit code."""
    error = sys.exc_info()[1]
    clean = error is None or (isinstance(error, SystemExit) and error.code in (0, None))
    return not clean or hasattr(sys, "last_type")


def end_sessions() -> None:
    """Close the engine of the process and the engine of each open `session`."""
    while engines:
        engines.pop().close()
    sized.clear()
    collectives.divide_among(None)


@contextlib.contextmanager
def apart() -> Iterator[Engine]:
    """Yield a new engine, with which this process rehearses a program on simulated devices. At the end of the `with`
    block, the new engine is closed, and the earlier engines of the process are restored."""
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
    world = joined.world if plan is None or joined.world.size == 1 else parallel.mesh.divide_work(plan, joined.world)
    return attach(Engine(world, joined.gate, tell, draws=ExactDraws() if exact else None, script=True))


def tell(text: str) -> None:
    """Print a line for the user, by meshwise's launcher if there is one, otherwise on stderr."""
    channel = rank_context().channel
    if channel is not None:
        channel.send("note", text=text)
    else:
        print(text, file=sys.stderr, flush=True)
