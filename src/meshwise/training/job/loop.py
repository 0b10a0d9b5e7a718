"""Run a job from its first or resumed step to the end.

The loop runs on every rank.

It reads the microbatches of a step, computes gradients and updates the model. It evaluates after epochs or steps.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, islice, tee
from pathlib import Path
from typing import Any

from meshwise.hardware.memory import peak_bytes, used_bytes
from meshwise.parallel.fits import check_fits
from meshwise.parallel.splits.rules import said
from meshwise.records import folder as names
from meshwise.records.checkpoints import run_and_checkpoint
from meshwise.reports.recorder import current
from meshwise.spec.errors import SaveError
from meshwise.spec.plan import Plan
from meshwise.training.data.order import batch_bounds, epoch_order, epoch_slices, sequential_slices
from meshwise.training.engine.engine import Engine, Microbatch
from meshwise.training.engine.loops import LoopRead
from meshwise.training.engine.steps import batches as read_batches
from meshwise.training.job.best import BestEpoch
from meshwise.training.job.evaluate import evaluate
from meshwise.training.job.job import EpochEnd, Job
from meshwise.training.job.not_finite import NotFinite
from meshwise.training.job.options import LOG_EVERY, SKIP, RunOptions
from meshwise.training.job.replica_check import ReplicaCheck
from meshwise.training.job.run import Data, begun, make_engine, open_data, read_parts
from meshwise.training.job.step import train_step
from meshwise.training.process.explain import explain
from meshwise.training.recording.recording import Recording
from meshwise.training.recovery.clock import SaveClock
from meshwise.training.recovery.loading import load
from meshwise.training.recovery.resume_changes import honour, made_with
from meshwise.training.recovery.saving import BACKGROUND, Saver
from meshwise.training.recovery.state import RunState, tree_of, unpack
from meshwise.training.recovery.weights import save_weights
from meshwise.training.tracking.metrics_log import LIVE_EVERY, MetricsLog, Send
from meshwise.training.tracking.tracking import log_into
from meshwise.transfer.collectives import barrier
from meshwise.workers.heartbeat import watched_loop
from meshwise.workers.join import RankContext, join


@dataclass
class JobRun:
    """One rank's run of a job: the objects that the training loop works with, and the results."""

    job: Job
    session: RankContext
    options: RunOptions
    plan: Plan
    folder: Path | None
    engine: Engine
    state: RunState
    log: MetricsLog
    best: BestEpoch
    clock: SaveClock
    train: Data
    test: Data | None
    replicas: ReplicaCheck
    not_finite: NotFinite
    metrics: dict[str, float] = field(default_factory=dict)
    stopped: bool = False
    saver: Saver | None = None
    evaluated: tuple[int, bool] = (-1, False)
    """The step of the last evaluation, and whether this evaluation was better than all before it."""
    epoch_began: tuple[float, int] = (0.0, 0)
    """When this epoch began in this process, and how many samples had been read before."""
    began: dict[str, int] = field(default_factory=dict)
    """The epoch and the step at which training began in this process; 0 unless the run was resumed."""


def run_job(job: Job, options: RunOptions, folder: Path | None, send: Send | None = None) -> dict[str, Any]:
    """Run `job` on this rank until it ends. Return a dict that describes the finished run on this rank. Collective.

    folder: the run folder, which must exist. With None, nothing is recorded or saved.
    send: a function that takes the run's messages. By default, messages go to the launcher.

    Raises UsageError if the job cannot be run with these options, and LossError if the loss is not finite.
    """
    session = join()
    plan = options.plan_on(session.world.size)
    check_fits(plan, session.world)
    if send is None and session.channel is not None:
        send = session.channel.send
    trackers = (*options.log, *job.trackers)
    log = MetricsLog(folder, send, session.world, trackers, scaled=plan.dtypes.scaled or options.on_nan == SKIP)
    recording = Recording(session.world, folder, log.note)
    status, run = "failed", None
    engine = make_engine(session, plan, log.note, exact_random=options.exact_random)
    try:
        run = _prepare(job, options, folder, session, log, engine)
        with log_into(log.tracking, lambda: current().step), watched_loop(compiles=plan.compile):
            _train(run)
        _finish(run)
        status = "stopped" if run.stopped else "finished"
    except BaseException as error:
        explain(error, session.world, None if run is None else run.state.step, recording.recorder, plan)
        raise
    finally:
        if run is not None and run.saver is not None and status == "failed":
            run.saver.close()
        engine.close()
        recording.close(status)
        log.tracking.close()
    notes = [run.best.why_over(run.state), run.not_finite.note(), *engine.notes, *(said() if plan.split else ())]
    notes.append(engine.draws.note() if engine.draws else "")
    return {
        "job": job.name,
        "status": status,
        "began": run.began,
        "epochs": run.state.epoch,
        "steps": run.state.step,
        "samples": recording.recorder.samples,
        "metrics": run.metrics,
        "best": run.best.found,
        "losses": log.losses,
        "memory": peak_bytes(session.world.device),
        "notes": tuple(filter(None, notes)),
    }


def _prepare(
    job: Job, options: RunOptions, folder: Path | None, session: RankContext, log: MetricsLog, engine: Engine
) -> JobRun:
    train = open_data(job, job.data(), "training set", engine)
    test = open_data(job, job.test(), "test set", engine) if job.test else None
    plan = options.plan_on(session.world.size)
    state = begun(job, plan, engine)
    now, resumed = made_with({"": state.optimizer}, job.batch_size, train.samples, job.seed), None
    if options.resume is not None and folder is not None:
        _, only = run_and_checkpoint(Path(options.resume))
        resumed = load(folder / names.CHECKPOINTS, session.world, log.note, only)
        unpack(state, resumed.tree)
        scheduled = state.scheduler is not None
        honour({"": state.optimizer}, state.made_with, now, log.note, index=state.index, scheduled=scheduled)
    state.made_with = now
    log.begin(state.step)
    best = BestEpoch(job, folder, resumed=options.resume is not None)
    check, saver = ReplicaCheck(plan), None
    if folder is not None:
        saved = None if resumed is None else resumed.saved
        saver = Saver(folder / names.CHECKPOINTS, session.world, log.note, saves=options.saves, resumed=saved)
    clock = SaveClock(options.saves, saver, partial(tree_of, state))
    nan = NotFinite(options.on_nan, state, folder, log.tell, scaled=plan.dtypes.scaled)
    given = job, session, options, plan, folder, engine, state, log, best, clock, train, test, check, nan
    run = JobRun(*given, saver=saver, began={"epoch": state.epoch, "step": state.step})
    if test is not None and job.best:  # evaluate one batch, to report a wrong metric name early
        best.check(evaluate(engine, job, state.model, _test_batches(run, min(test.samples, job.batch_size))))
    log.send("began", job=job.name, epochs=job.epochs, steps=-(-train.samples // job.batch_size), step=state.step)
    return run


def _train(run: JobRun) -> None:
    state, job = run.state, run.job
    state.model.train()
    while state.epoch < job.epochs and not run.best.is_over(state):
        run.stopped = _train_epoch(run)
        if run.stopped or (state.index < run.train.samples and run.best.is_over(state)):
            break
        state.epoch, state.index = state.epoch + 1, 0
        _end_epoch(run)


def _end_epoch(run: JobRun) -> None:
    """Evaluate, if an evaluation is due, and call the job's callbacks."""
    state, job = run.state, run.job
    if run.evaluated[0] != state.step and any(_evaluation_is_due(run, unit) for unit in ("steps", "epochs")):
        _evaluate(run, state.epoch)
    here = run.evaluated[0] == state.step
    metrics, best = run.metrics if here else {}, here and run.evaluated[1]
    facts = (state.epoch, job.epochs, state.step, run.log.last_loss, metrics, best, state.model, state.optimizer)
    for callback in job.callbacks:
        callback(EpochEnd(*facts))
        state.model.train()


def _evaluation_is_due(run: JobRun, unit: str) -> bool:
    """Return whether to evaluate after this step or epoch (see `unit`). The last epoch is always evaluated."""
    every, of = run.job.evaluates
    done = run.state.step if unit == "steps" else run.state.epoch
    last = unit == "epochs" and run.state.epoch == run.job.epochs
    return run.test is not None and (last or (of == unit and done % every == 0))


def _evaluate(run: JobRun, epoch: int) -> None:
    """Evaluate the model, and save its weights if they are the best so far. epoch: counted from 1. Collective."""
    state, job = run.state, run.job
    assert run.test is not None
    run.metrics = evaluate(run.engine, job, state.model, _test_batches(run, run.test.samples))
    run.evaluated = state.step, run.best.take(run.metrics, epoch, state.step, state.model)
    if run.log.evaluated != state.step:  # an earlier attempt may have recorded this result
        facts = {"best": run.evaluated[1], "inside": epoch > state.epoch}
        run.log.add_evaluation(epoch - 1, job.epochs, state.step, run.metrics, **facts)


def _train_epoch(run: JobRun) -> bool:
    """Train from the current position to the end of the epoch. Return True if the run is asked to stop first."""
    state, job, log = run.state, run.job, run.log
    in_epoch = -(-state.index // job.batch_size)
    gaps, nan = run.not_finite.ranges(state.epoch, state.index), run.not_finite if run.not_finite.checks else None
    steps = in_epoch + -(-(run.train.samples - state.index) // job.batch_size) - len(gaps)
    bounds = batch_bounds(run.train.samples, job.batch_size, state.index, gaps)
    run.epoch_began = time.perf_counter(), current().samples
    log_every = run.options.log_every or LOG_EVERY
    in_steps = job.evaluates[1] == "steps"
    loop = LoopRead(step=state.step + 1)
    # This frame keeps `batches` open, so that a rank that leaves the loop by an error still counts as inside the epoch.
    batches = read_batches(run.engine, "an epoch", _train_batches(run), job.batch_size, loop=loop)
    if 0 < state.index < run.train.samples and _evaluation_is_due(run, "steps") and log.evaluated != state.step:
        _evaluate(run, state.epoch + 1)  # an earlier attempt ended before this evaluation
        if run.best.is_over(state):
            return False
    for parts, (first, stop) in zip(batches, bounds, strict=False):
        run.not_finite.last.append((state.epoch, first, stop))
        done = state.step
        losses = train_step(run.engine, job, state, parts, nan)
        state.index, loop.step = stop, state.step + 1
        if state.step == done:  # a value was not finite, so the step was skipped
            steps -= 1
            continue
        in_epoch += 1
        log.pending.append((state.epoch, state.step, losses))
        due = in_steps and _evaluation_is_due(run, "steps")
        if due or in_epoch % log_every == 0 or in_epoch == steps:
            log.sync()
            log.send("memory", bytes=used_bytes(run.session.world.device))
            _send_progress(run, "log", in_epoch, steps)
            if due:
                _evaluate(run, state.epoch + 1)
            if due and run.best.is_over(state):
                break
        elif (now := time.monotonic()) >= log.live_due:
            log.live_due = now + LIVE_EVERY
            _send_progress(run, "progress", in_epoch, steps)
        if state.step >= run.clock.look and run.clock.is_due(state.step):
            _save(run, background=run.options.saves.in_background)
        if state.step % run.replicas.every == 0:
            run.replicas.compare(state)
    log.sync()
    if run.engine.stopped:
        run.session.gate.stopped_after = state.step, state.epoch + 1
        log.send("stopping", step=state.step, epoch=state.epoch + 1)
    return run.engine.stopped


def _train_batches(run: JobRun) -> Iterator[Sequence[Microbatch]]:
    """Yield the microbatches of each step, on the device. The next microbatches are loaded in the meantime."""
    state, world, accumulate = run.state, run.engine.world, run.plan.accumulate
    order = epoch_order(state.seed, state.epoch, run.train.samples)
    gaps = run.not_finite.ranges(state.epoch)
    slices, ahead = tee(epoch_slices(order, run.job.batch_size, world, accumulate, state.index, gaps))
    pairs = read_parts(run.train, chain.from_iterable(ahead), state.epoch, world.device)
    # Make lists, because `zip` would keep batches in memory too long (see `read_slices` in training/data/source.py).
    return map(list, zip(pairs, strict=False)) if accumulate == 1 else (list(islice(pairs, len(s))) for s in slices)


def _test_batches(run: JobRun, samples: int) -> Iterator[Microbatch]:
    """Yield batches of the first `samples` samples of the test set."""
    assert run.test is not None
    slices = sequential_slices(samples, run.job.batch_size, run.engine.world)
    return read_parts(run.test, slices, 0, run.engine.world.device)


def _send_progress(run: JobRun, kind: str, in_epoch: int, steps: int) -> None:
    if run.session.world.rank != 0:
        return
    state, (began, samples) = run.state, run.epoch_began
    left = (run.job.epochs - state.epoch) * run.train.samples - state.index
    rate = (current().samples - samples) / max(time.perf_counter() - began, 1e-9)
    facts = {"epoch": state.epoch + 1, "epochs": run.job.epochs, "step": in_epoch, "steps": steps}
    speed = {"samples_per_second": rate, "seconds_left": left / rate if rate > 0 else None}
    run.log.send(kind, **facts, loss=run.log.last_loss, **speed)


def _save(run: JobRun, *, wait: bool = False, background: bool = False) -> None:
    """Save the state."""
    state, began = run.state, time.monotonic()
    run.log.sync()  # write the records up to the step from which a restart resumes
    run.replicas.compare(state)
    if run.not_finite.back:
        run.not_finite.refuse_spoiled(state.step)
    if run.saver is not None:
        facts = {name: getattr(state, name) for name in ("step", "epoch", "index", "seed")}
        facts |= {"plan": str(run.plan), BACKGROUND: background}
        run.saver.save(partial(tree_of, state), facts, wait=wait, began=began)


def _finish(run: JobRun) -> None:
    """Save the state and, after a complete run, the weights. Raise SaveError if they cannot be written."""
    saver = run.saver
    if saver is not None:
        saver.settle()
        newest = -1 if run.options.saves.in_background else saver.saved  # the final save replaces background saves
        if run.state.step not in (newest, run.began["step"] if run.options.resume is not None else -1):
            _save(run, wait=True)
    if run.folder is not None and not run.stopped:
        try:
            save_weights(run.state.model, run.folder / names.WEIGHTS)
        except OSError as error:
            raise SaveError(f"the weights could not be saved in {run.folder}: {error.strerror}.") from error
    if saver is not None:
        saver.settle()
        if saver.wrong:
            raise SaveError(f"the last state of the run, at step {run.state.step}, could not be saved: {saver.wrong}.")
    if run.session.channel is None:
        barrier()  # without a launcher, nothing else waits for rank 0's files
