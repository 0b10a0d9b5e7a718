"""Run a program, watched: a job under a plan, or a script on any number of devices. Runs on every rank.

Nothing here trains: the real `apply`, the real step and the real evaluation do.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch
from torch import nn

from meshwise.equivalence.across_ranks import slices_of_ranks
from meshwise.equivalence.engine_watcher import EngineWatcher
from meshwise.equivalence.program_trace import ProgramTrace
from meshwise.equivalence.short_loops import ScriptEnds
from meshwise.equivalence.trace import CheckSpec, Draws, global_batches, test_samples
from meshwise.equivalence.upcast import called_in_float64, upcast
from meshwise.parallel.split.rules import said
from meshwise.training.engine import Engine
from meshwise.training.evaluate import evaluate
from meshwise.training.job import Job
from meshwise.training.job_step import train_step
from meshwise.training.loop import begun, make_engine, open_data, read_parts
from meshwise.training.order import epoch_slices, sequential_slices
from meshwise.training.session import default_engine
from meshwise.workers.join import join


def watch_script(script: Callable[[], object], spec: CheckSpec, draws: Draws | None, seed: int) -> ProgramTrace | None:
    """Run `script`, as `python script.py` would, in this process for the steps of `spec`. Collective; rank 0 gets what
    all ranks did.

    The script runs as it is, from the same seeds, in float64 if `spec` says so, with its loops cut short (see
    short_loops.py), and ends on all ranks together. draws: the random draws of one device, on the side that follows it.
    """
    engine = default_engine()
    watcher = EngineWatcher(engine, spec, seed, draws)
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)
    engine.watch(watcher)
    try:
        inside = spec.in_float64
        with upcast(inside), called_in_float64(inside), contextlib.suppress(ScriptEnds):
            try:
                _run(script)
            finally:
                watcher.stop()  # a forward may be open, in the precision that begins here
    finally:
        engine.watcher = None
    found = watcher.end()
    return found if engine.world.rank == 0 else None


def _run(script: Callable[[], object]) -> None:
    try:
        script()
    except SystemExit as end:
        if end.code not in (None, 0):
            raise


def watch_job(job: Job, spec: CheckSpec, draws: Draws) -> ProgramTrace | None:
    """Train `job` under the plan of `spec`, and evaluate it. Collective; rank 0 gets what all ranks did."""
    engine = make_engine(join(), spec.plan)
    watcher = EngineWatcher(engine, spec, job.seed, draws, job=job)
    try:
        watcher.found.plan = spec.plan
        with called_in_float64(spec.in_float64), contextlib.suppress(ScriptEnds):
            _train(job, spec, engine, watcher)
        found = watcher.end()
    finally:
        watcher.stop()
        engine.close()
    return found if engine.world.rank == 0 else None


def _train(job: Job, spec: CheckSpec, engine: Engine, watcher: EngineWatcher) -> None:
    state = begun(job, spec.applied(spec.plan), engine)
    notes = tuple(engine.notes)
    engine.watch(watcher)
    if state.scheduler is not None:
        engine.schedulers.add(state.scheduler)
    data = open_data(job, job.data(), "training set")
    state.model.train()
    for epoch, batch in global_batches(job.seed, data.samples, job.batch_size, spec):
        (slices,) = epoch_slices(batch, len(batch), engine.world, spec.plan.accumulate)
        train_step(engine, job, state, list(read_parts(data, slices, epoch, engine.world.device)))
        watcher.complete_step()
    if watcher.found.trace is not None:
        watcher.found.trace.notes = (*notes, *(said() if spec.plan.split else ()))
    _evaluate(job, state.model, engine, watcher)


def _evaluate(job: Job, model: nn.Module, engine: Engine, watcher: EngineWatcher) -> None:
    trace, tracer = watcher.found.trace, watcher.tracer
    if job.test is None or trace is None or tracer is None:
        return
    data = open_data(job, job.test(), "test set")
    slices = list(sequential_slices(test_samples(data.samples, job.batch_size), job.batch_size, engine.world))
    counted, rows = slices_of_ranks(slices, engine.world)
    batches = read_parts(data, slices, 0, engine.world.device)
    metrics = None if job.metrics is None else tracer.keyed(job.metrics, rows)
    keyed = replace(job, loss=tracer.keyed(job.loss, rows), metrics=metrics)
    trace.evaluation = evaluate(engine, keyed, model, batches)
    trace.padding_ranks = {max(parts, key=len)[0]: parts.count([]) for parts in counted if any(parts)}
    trace.evaluated = [index for parts in counted for part in parts for index in part]
