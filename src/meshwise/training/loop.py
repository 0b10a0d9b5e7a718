"""The loop: a job from its first step, or from a saved one, to its final accuracy. Runs on every rank.

A short loop on the engine: read the microbatches of a step, compute, update; evaluate after each epoch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import chain, tee
from pathlib import Path
from typing import Any

import torch

from meshwise.machine.memory import peak_bytes
from meshwise.parallel.apply import check_fits
from meshwise.parallel.deferred import constructed
from meshwise.parallel.mesh import divide_work
from meshwise.parallel.split.rules import said
from meshwise.parallel.step_hooks import needs_closure
from meshwise.records import folder as names
from meshwise.recovery.checkpoint import load_checkpoint, save_checkpoint
from meshwise.recovery.state import RunState, pack, unpack
from meshwise.recovery.weights import save_weights
from meshwise.spec.errors import UsageError
from meshwise.spec.plan import Plan
from meshwise.timeline.recorder import current
from meshwise.training.best import BestEpoch
from meshwise.training.engine import Engine, Part
from meshwise.training.evaluate import evaluate
from meshwise.training.explain import explain
from meshwise.training.job import EpochEnd, Job
from meshwise.training.job_step import train_step
from meshwise.training.keyed import ExactDraws
from meshwise.training.metrics_log import MetricsLog, Send
from meshwise.training.order import BatchSlice, epoch_order, epoch_slices, sequential_slices
from meshwise.training.pace import Pace
from meshwise.training.recording import Recording
from meshwise.training.run_options import LOG_EVERY, RunOptions
from meshwise.training.source import LoaderSettings, Reader, count_samples, read_slices, reader
from meshwise.training.tracking import log_into
from meshwise.transfer.collectives import barrier
from meshwise.transfer.prefetch import prefetch
from meshwise.workers.join import RankContext, join


@dataclass(frozen=True)
class Data:
    """A data set of the job, ready to be read."""

    samples: int
    read: Reader


@dataclass
class _Run:
    """One rank's run of a job."""

    job: Job
    session: RankContext
    options: RunOptions
    plan: Plan
    folder: Path | None
    engine: Engine
    state: RunState
    log: MetricsLog
    best: BestEpoch
    train: Data
    test: Data | None
    metrics: dict[str, float] = field(default_factory=dict)
    stopped: bool = False
    saved_step: int = -1
    evaluated: tuple[int, bool] = (-1, False)
    """The step after which it was evaluated last, and whether that was the best."""
    began: dict[str, int] = field(default_factory=dict)
    """The epochs and steps that were done before this session."""


def run_job(job: Job, options: RunOptions, folder: Path | None, send: Send | None = None) -> dict[str, Any]:
    """Run `job` on this rank. Collective: every rank calls it. Returns the rank's facts of the finished run.

    folder: the run folder, which exists; None keeps no records. send: gets the messages of the run; the launcher by
    default. Raises UsageError for what cannot be run, LossError when the loss is not a number any more.
    """
    session = join()
    plan = options.plan_on(session.world.size)
    check_fits(plan, session.world)
    if send is None and session.channel is not None:
        send = session.channel.send
    trackers = (*options.log, *job.trackers)
    log = MetricsLog(folder, send, session.world, trackers, scaled=plan.dtypes.scaled)
    recording = Recording(session.world, folder, log.note)
    status, run = "failed", None
    engine = make_engine(session, plan, log.note, exact_random=options.exact_random)
    try:
        run = _prepare(job, options, folder, session, log, engine)
        with log_into(log.tracking, lambda: current().step):
            _train(run)
        _finish(run)
        status = "stopped" if run.stopped else "finished"
    except BaseException as error:
        explain(error, session.world, None if run is None else run.state.step, recording.recorder)
        raise
    finally:
        engine.close()
        recording.close(status)
        log.close()
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
        "notes": tuple(
            filter(
                None,
                (
                    run.best.why_over(run.state),
                    *engine.notes,
                    *(said() if plan.split else ()),
                    engine.draws.note() if engine.draws else "",
                ),
            )
        ),
    }


def make_engine(
    session: RankContext, plan: Plan, notify: Callable[[str], None] = lambda text: None, *, exact_random: bool = False
) -> Engine:
    """An engine for a job under `plan`. notify: takes the notes on its plan."""
    return Engine(divide_work(plan, session.world), session.gate, notify, draws=ExactDraws() if exact_random else None)


def _prepare(
    job: Job, options: RunOptions, folder: Path | None, session: RankContext, log: MetricsLog, engine: Engine
) -> _Run:
    train = open_data(job, job.data(), "training set")
    test = open_data(job, job.test(), "test set") if job.test else None
    plan = options.plan_on(session.world.size)
    state = begun(job, plan, engine)
    if options.resume is not None and folder is not None:
        unpack(state, load_checkpoint(folder / names.CHECKPOINTS))
    log.begin(state.step)
    best = BestEpoch(job, folder, resumed=options.resume is not None)
    run = _Run(job, session, options, plan, folder, engine, state, log, best, train, test)
    run.began = {"epoch": state.epoch, "step": state.step}
    if test is not None and job.best:  # one batch, since a wrong name is to be known before an epoch is over
        best.check(evaluate(engine, job, state.model, _test_batches(run, min(test.samples, job.batch_size))))
    run.saved_step = state.step if options.resume is not None else -1
    log.send("began", job=job.name, epochs=job.epochs, steps=-(-train.samples // job.batch_size), step=state.step)
    return run


def begun(job: Job, plan: Plan, engine: Engine) -> RunState:
    """The state of a run before its first step: the model of `job` under `plan`, its optimizer. Collective."""
    torch.manual_seed(job.seed)
    model, note = constructed(job.model) if plan.parameters_divided or plan.pipeline > 1 else (job.model(), "")
    if plan.devices == 1:  # what several devices have is placed by the plan
        model.to(engine.world.device)
    engine.program.stage_cost = job.stage_cost
    engine.add_models([model], plan)
    if note:
        engine.notify(note)
    optimizer = job.optimizer(model.parameters())
    if plan.dtypes.scaled and needs_closure(optimizer):
        raise UsageError(
            f"job '{job.name}': {type(optimizer).__name__} runs the loss several times a step, and precision="
            f"{plan.precision!r} scales a loss once a step. Use precision='bf16' or 'fp32', or another optimizer."
        )
    engine.add_optimizer(optimizer)
    scheduler = job.scheduler(optimizer) if job.scheduler else None
    return RunState(model, optimizer, scheduler, loss_scaler(engine.world.device, plan), job.seed)


def loss_scaler(device: str, plan: Plan) -> torch.amp.GradScaler:
    """Scales the loss where float16 is computed in; passes everything through otherwise."""
    return torch.amp.GradScaler(device.split(":")[0], enabled=plan.dtypes.scaled)


def open_data(job: Job, data: Any, what: str) -> Data:
    """A data set of the job: `what` it is, in errors."""
    settings = LoaderSettings(job.collate, job.loader_workers, job.seed, several=True)
    return Data(count_samples(data, f"the {what} of job '{job.name}'"), reader(data, settings))


def _train(run: _Run) -> None:
    state, job = run.state, run.job
    state.model.train()
    while state.epoch < job.epochs and not run.best.is_over(state):
        run.stopped = _train_epoch(run)
        if run.stopped or (state.index < run.train.samples and run.best.is_over(state)):
            break
        state.epoch, state.index = state.epoch + 1, 0
        _end_epoch(run)


def _end_epoch(run: _Run) -> None:
    """Evaluate, where it is time, and call the job's callbacks."""
    state, job = run.state, run.job
    known = _evaluation_is_due(run, "steps")  # and written: where not by this process, before the state was saved
    if run.evaluated[0] != state.step and (known or _evaluation_is_due(run, "epochs")):
        _evaluate(run, state.epoch, write=not known)
    here = run.evaluated[0] == state.step
    metrics, best = run.metrics if here else {}, here and run.evaluated[1]
    facts = (state.epoch, job.epochs, state.step, run.log.last_loss, metrics, best, state.model, state.optimizer)
    for callback in job.callbacks:
        callback(EpochEnd(*facts))
        state.model.train()


def _evaluation_is_due(run: _Run, unit: str) -> bool:
    """Whether it is time after this step, or at the end of this epoch; and at the end of the training."""
    every, of = run.job.evaluates
    done = run.state.step if unit == "steps" else run.state.epoch
    last = unit == "epochs" and run.state.epoch == run.job.epochs
    return run.test is not None and (last or (of == unit and done % every == 0))


def _evaluate(run: _Run, epoch: int, *, write: bool = True) -> None:
    """Evaluate in this epoch (from 1), and keep what is best. Collective."""
    state, job = run.state, run.job
    assert run.test is not None
    run.metrics = evaluate(run.engine, job, state.model, _test_batches(run, run.test.samples))
    run.evaluated = state.step, run.best.take(run.metrics, epoch, state.step, state.model)
    if write:
        facts = {"best": run.evaluated[1], "inside": epoch > state.epoch}
        run.log.add_evaluation(epoch - 1, job.epochs, state.step, run.metrics, **facts)


def _train_epoch(run: _Run) -> bool:
    """Train from where the state is to the end of the epoch. Returns whether all ranks stop before that."""
    state, job, log = run.state, run.job, run.log
    in_epoch = -(-state.index // job.batch_size)
    steps = in_epoch + -(-(run.train.samples - state.index) // job.batch_size)
    pace = Pace(run.train.samples * job.epochs, current().samples)
    wanted, log_every = False, run.options.log_every or LOG_EVERY
    # Held by this frame: a rank that leaves inside the loop is still in the middle of an epoch when it is asked.
    batches = run.engine.batches("an epoch", _train_batches(run), job.batch_size, step=lambda: state.step + 1)
    for parts in batches:
        losses = train_step(run.engine, job, state, parts)
        in_epoch += 1
        state.index = min(state.index + job.batch_size, run.train.samples)
        log.add(state.epoch, state.step, losses)
        due = _evaluation_is_due(run, "steps")
        if due or in_epoch % log_every == 0 or in_epoch == steps:
            wanted = log.sync(run.session.gate.wanted)
            log.send_memory()
            _send_progress(run, "log", pace, in_epoch, steps)
            if due:
                _evaluate(run, state.epoch + 1)
            if wanted or (due and run.best.is_over(state)):
                break
        elif log.live_is_due():
            _send_progress(run, "progress", pace, in_epoch, steps)
        if run.options.save_every and state.step % run.options.save_every == 0:
            _save(run)
    log.sync()
    if run.engine.stopped:
        log.send("stopping", step=state.step, epoch=state.epoch + 1)
    return wanted or run.engine.stopped


def _train_batches(run: _Run) -> Iterator[list[Part]]:
    """The microbatches of each step, on the device, with the next ones on their way."""
    state, world, accumulate = run.state, run.engine.world, run.plan.accumulate
    order = epoch_order(state.seed, state.epoch, run.train.samples)
    slices, ahead = tee(epoch_slices(order, run.job.batch_size, world, accumulate, state.index))
    pairs = read_parts(run.train, chain.from_iterable(ahead), state.epoch, world.device)
    for step in slices:
        yield [next(pairs) for _ in step]


def _test_batches(run: _Run, samples: int) -> Iterator[Part]:
    """The first samples of the test set."""
    assert run.test is not None
    slices = sequential_slices(samples, run.job.batch_size, run.engine.world)
    return read_parts(run.test, slices, 0, run.engine.world.device)


def read_parts(data: Data, slices: Iterable[BatchSlice], epoch: int, device: str) -> Iterator[Part]:
    """The microbatches of `slices`, on the device, with the next ones on their way."""
    pairs = read_slices(data.read, slices, epoch)
    return pairs if device == "cpu" else prefetch(pairs, device)


def _send_progress(run: _Run, kind: str, pace: Pace, in_epoch: int, steps: int) -> None:
    if run.session.world.rank != 0:
        return
    state = run.state
    behind = state.epoch * run.train.samples + state.index
    facts = {"epoch": state.epoch + 1, "epochs": run.job.epochs, "step": in_epoch, "steps": steps}
    run.log.send(kind, **facts, loss=run.log.last_loss, **pace.facts(current().samples, behind))


def _save(run: _Run) -> None:
    """Save the state: every rank gives its part, rank 0 writes. Collective."""
    state, folder = run.state, run.folder
    if folder is None or run.saved_step == state.step:
        return
    with current().span("checkpoint"):
        packed = pack(state)
        if packed is not None:
            save_checkpoint(folder / names.CHECKPOINTS, packed)
    run.saved_step = state.step


def _finish(run: _Run) -> None:
    """Save the state and, of a run that came to its end, the weights."""
    _save(run)
    if run.folder is not None and not run.stopped:
        save_weights(run.state.model, run.folder / names.WEIGHTS)
    if run.session.channel is None:
        barrier()  # without a launcher nobody waits for rank 0's files
