"""Run a job or a script on every rank, and record it.

A job runs under a plan, a script on any number of devices.

This file has no training code: it calls the code that applies a plan, makes a step and evaluates in an ordinary run.
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist

from meshwise.checker.across_ranks import slices_of_ranks
from meshwise.checker.contents import reading_of
from meshwise.checker.engine_watcher import EngineWatcher
from meshwise.checker.races.watch import watch
from meshwise.checker.short_loops import ScriptEnds
from meshwise.checker.trace import Batches, CheckSpec, Draws, ProgramTrace, test_samples
from meshwise.checker.unsummed import UnsummedLoops
from meshwise.checker.upcast import called_in_float64, plain_attention, upcast
from meshwise.parallel.splits.rules import said
from meshwise.torch_compat.perturbed import perturbed
from meshwise.training.data.order import epoch_slices, sequential_slices
from meshwise.training.engine.engine import Engine
from meshwise.training.engine.seeds import seed_all
from meshwise.training.guards.registry import attach
from meshwise.training.job.evaluate import evaluate
from meshwise.training.job.job import Job
from meshwise.training.job.run import Data, begun, make_engine, open_data, read_parts
from meshwise.training.job.step import train_step
from meshwise.training.process.session import default_engine
from meshwise.training.recovery.state import RunState, pack, unpack
from meshwise.transfer.collectives import broadcast_object, gather_objects
from meshwise.transfer.groups import everyone, get_rank, world_size
from meshwise.workers.join import join, made_process_group

RESUMED = 2  # resume twice, since the state that a resumed run saves may be incomplete


def watch_script(script: Callable[[], object], spec: CheckSpec, draws: Draws | None, seed: int) -> ProgramTrace | None:
    """Run `script` in this process as `python script.py` would, until it has made the steps that `spec` asks for. Rank
    0 returns the trace."""
    engine = default_engine()
    watcher = EngineWatcher(engine, spec, seed, draws)
    seed_all(seed)
    engine.watch(watcher)
    if engine.world.size > 1:
        engine.events.listen(UnsummedLoops(engine, watcher.unsummed), batches=2, whole=())
    try:
        inside = spec.in_float64
        with (
            _disturbed(spec, seed) as races,
            upcast(inside),
            called_in_float64(inside),
            plain_attention(),
            watcher.hints.noting() if watcher.hints is not None else contextlib.nullcontext(),
            contextlib.suppress(ScriptEnds),
            patch.object(dist, "destroy_process_group", _leave_own(dist.destroy_process_group)),
        ):
            try:
                _run(script)
            finally:
                watcher.stop()  # an open forward entered contexts inside those above, so it ends first
    finally:
        engine.watcher = None
    found = watcher.end()
    _tell(races, found)
    return found if engine.world.rank == 0 else None


def _leave_own(leave: Callable[..., None]) -> Callable[..., None]:
    """Wrap `leave`, which is dist.destroy_process_group, so that it spares a default group that meshwise made."""

    def called(group: Any = None) -> None:
        if group is not None or not made_process_group():
            leave(group)

    return called


@contextlib.contextmanager
def _disturbed(spec: CheckSpec, seed: int) -> Iterator[list[str]]:
    """If `spec.perturb` is True, find races inside the with block. Yield the list that receives them."""
    found: list[str] = []
    if not spec.perturb:
        yield found
        return
    with watch(lambda finding: None) as of_streams:
        if world_size(everyone()) == 1 or not (spec.in_float64 or spec.plan.precision == "fp64"):
            yield found
        else:  # in the float64 pass only, as the waits that perturbed() adds can hide stream races
            with perturbed(seed, get_rank(everyone())) as disturbed:
                yield found
            found += disturbed.races
    found += map(str, of_streams)


def _tell(races: list[str], found: ProgramTrace) -> None:
    """Gather the races that all ranks have found, and store them in the trace."""
    if found.trace is not None:
        found.trace.races = sorted({race for own in gather_objects(races, everyone()) for race in own})


def _run(script: Callable[[], object]) -> None:
    try:
        script()
    except SystemExit as end:
        if end.code not in (None, 0):
            raise


@dataclass
class _Run:
    """A job that trains under a plan while a watcher records it."""

    job: Job
    spec: CheckSpec
    engine: Engine
    watcher: EngineWatcher
    state: RunState

    def begin(self) -> None:
        """Attach the watcher to the engine, and set the model to training mode."""
        self.engine.watch(self.watcher)
        if self.state.scheduler is not None:
            self.engine.given.schedulers.add(self.state.scheduler)
        self.state.model.train()


def watch_job(job: Job, spec: CheckSpec, draws: Draws) -> ProgramTrace | None:
    """Train `job` under the plan of `spec`, and evaluate it. Rank 0 returns the trace."""
    engine = make_engine(join(), spec.plan)
    watcher = EngineWatcher(engine, spec, job.seed, draws, job=job)
    run: _Run | None = None
    try:
        watcher.found.plan = spec.plan
        in_float64 = called_in_float64(spec.in_float64)
        with _disturbed(spec, job.seed) as races, in_float64, plain_attention(), contextlib.suppress(ScriptEnds):
            run = _Run(job, spec, engine, watcher, begun(job, spec.applied(spec.plan), engine))
            _train(run)
        found = watcher.end()
        _tell(races, found)
    finally:
        watcher.stop()
        (engine if run is None else run.engine).close()
    return found if engine.world.rank == 0 else None


def _train(run: _Run) -> None:
    job, spec, trace = run.job, run.spec, run.watcher.found
    held = job.data()
    data = open_data(job, held, "training set")
    run.watcher.reading = reading_of(held, job.collate)
    test = None if job.test is None else open_data(job, job.test(), "test set")
    notes = tuple(run.engine.notes)
    run.begin()
    for number in range(spec.steps_of(job)):
        begins = 0 < number == spec.steps - 1
        for _ in range(RESUMED if begins and number > 1 else 0):
            _go_on(run)
        if begins:
            _evaluate(run, test)
        state, engine = run.state, run.engine
        order = Batches(state.seed, data.samples, job.batch_size, spec)
        state.epoch, state.index, batch = order.of_step(number, state.epoch, state.index)
        (slices,) = epoch_slices(batch, len(batch), engine.world, spec.plan.accumulate)
        train_step(engine, job, state, list(read_parts(data, slices, state.epoch, engine.world.device)))
        run.watcher.complete_step()
    if trace.trace is not None:
        trace.trace.notes = (*notes, *(said() if spec.plan.split else ()))
    _evaluate(run, test)


def _go_on(run: _Run) -> None:
    """Save the run, and continue with a new run that loads the saved state. Collective."""
    written = io.BytesIO()
    torch.save(pack(run.state), written)
    saved: Any = torch.load(io.BytesIO(broadcast_object(written.getvalue(), everyone())), weights_only=True)
    run.engine.close()
    run.engine = attach(Engine(run.engine.world, run.engine.gate, lambda text: None))
    run.state = begun(run.job, run.spec.applied(run.spec.plan), run.engine)
    unpack(run.state, saved)
    run.watcher.follow(run.engine, run.state.model)
    run.watcher.resumed(run.state.model, run.state.optimizer, run.state.scheduler)
    run.begin()


def _evaluate(run: _Run, data: Data | None) -> None:
    """Evaluate the test set, and record its metrics in the trace in place of earlier ones."""
    job, engine = run.job, run.engine
    trace, tracer = run.watcher.found.trace, run.watcher.tracer
    if data is None or trace is None or tracer is None:
        return
    count = test_samples(data.samples, job.batch_size, run.spec)
    slices = list(sequential_slices(count, job.batch_size, engine.world))
    counted, rows = slices_of_ranks(slices, engine.world)
    batches = read_parts(data, slices, 0, engine.world.device)
    metrics = None if job.metrics is None else tracer.keyed(job.metrics, rows)
    keyed = replace(job, loss=tracer.keyed(job.loss, rows), metrics=metrics)
    trace.evaluation = evaluate(engine, keyed, run.state.model, batches)
    trace.evaluated = [index for parts in counted for part in parts for index in part]
