"""The loop: a job from its first step, or from a saved one, to its final accuracy. Runs on every rank."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from meshwise.machine.memory import memory_facts, peak_bytes
from meshwise.parallel.apply import Applied, apply, bind
from meshwise.parallel.deferred import constructed
from meshwise.parallel.fits import check_fits
from meshwise.parallel.precision import loss_scaler
from meshwise.parallel.shard import note_what_was_not_gathered
from meshwise.records import folder as names
from meshwise.recovery.checkpoint import load_checkpoint, save_checkpoint
from meshwise.recovery.state import RunState, pack, unpack
from meshwise.recovery.weights import save_weights
from meshwise.spec.errors import MeshwiseError
from meshwise.spec.plan import Plan
from meshwise.spec.units import bytes_text
from meshwise.spec.world import World
from meshwise.timeline.recorder import Recorder
from meshwise.training.block_spans import record_blocks
from meshwise.training.evaluate import evaluate
from meshwise.training.exact import StepDraws
from meshwise.training.job import Job
from meshwise.training.journal import Journal, Tell
from meshwise.training.order import BatchSlice, epoch_order, epoch_slices, sequential_slices
from meshwise.training.recording import Recording
from meshwise.training.run_options import LOG_EVERY, RunOptions
from meshwise.training.source import LoaderSettings, Reader, count_samples, reader
from meshwise.training.step import Part, StepContext, train_step
from meshwise.transfer.collectives import barrier
from meshwise.transfer.prefetch import prefetch
from meshwise.workers.join import RankContext, join
from meshwise.workers.worker import in_progress


@dataclass(frozen=True)
class Data:
    """A data set of the job, ready to be read."""

    samples: int
    read: Reader


@dataclass
class _Run:
    """One rank's run of a job."""

    session: RankContext
    options: RunOptions
    folder: Path | None
    context: StepContext
    journal: Journal
    train: Data
    test: Data | None
    metrics: dict[str, float] = field(default_factory=dict)
    samples: int = 0
    stopped: bool = False
    saved_step: int = -1


def run_job(job: Job, options: RunOptions, folder: Path | None, tell: Tell | None = None) -> dict[str, Any]:
    """Run `job` on this rank. Collective: every rank calls it. Returns the rank's facts of the finished run.

    folder: the run folder, which exists; None keeps no records. tell: gets the messages of the run; the launcher by
    default. Raises UsageError for what cannot be run, LossError when the loss is not a number any more.
    """
    session = join()
    plan = options.plan_on(session.world.size)
    check_fits(plan, session.world)
    if tell is None and session.channel is not None:
        tell = session.channel.send
    journal = Journal(folder, tell, session.world, scaled=plan.dtypes.scaled)
    recording = Recording(session.world, folder, lambda text: journal.tell("say", text=text))
    recorder, status = recording.recorder, "failed"
    run: _Run | None = None
    try:
        run = _prepare(job, options, folder, session, journal, recorder)
        _train(run)
        _finish(run)
        status = "stopped" if run.stopped else "finished"
    except BaseException as error:
        _explain(error, session, run, recorder)
        raise
    finally:
        recording.close(status)
        journal.close()
    return {
        "job": job.name,
        "status": status,
        "epochs": run.context.state.epoch,
        "steps": run.context.state.step,
        "samples": run.samples,
        "metrics": run.metrics,
        "losses": journal.losses,
        "memory": peak_bytes(session.world.device),
        "notes": (*_notes(run.context.applied, options), *_unkeyed(run.context.draws)),
    }


def _prepare(
    job: Job, options: RunOptions, folder: Path | None, session: RankContext, journal: Journal, recorder: Recorder
) -> _Run:
    world = session.world
    plan = options.plan_on(world.size)
    train, test = _data(job, job.data(), "training set"), _data(job, job.test(), "test set") if job.test else None
    applied, state = begun(job, plan, world)
    record_blocks(applied.model)
    if options.resume is not None and folder is not None:
        unpack(state, load_checkpoint(folder / names.CHECKPOINTS))
        journal.rewind(state.step)
    context = StepContext(job, applied, state, world, recorder, StepDraws(exact=options.exact_random))
    run = _Run(session, options, folder, context, journal, train, test)
    run.saved_step = state.step if options.resume is not None else -1
    for note in _notes(applied, options) if world.rank == 0 else ():
        journal.tell("say", text=note)
    journal.tell("began", job=job.name, epochs=job.epochs, steps=-(-train.samples // job.batch_size), step=state.step)
    return run


def _notes(applied: Applied, options: RunOptions) -> tuple[str, ...]:
    """What the plan says of itself, but for what exact draws make untrue."""
    return tuple(note for note in applied.notes if not (options.exact_random and note.startswith("dropout:")))


def begun(job: Job, plan: Plan, world: World) -> tuple[Applied, RunState]:
    """The model of `job` under `plan`, and the state of a run before its first step. Collective."""
    torch.manual_seed(job.seed)
    model, note = constructed(job.model) if plan.parameters_divided else (job.model(), "")
    applied = apply(model, plan, world, counts=lambda: state.counts)
    if note:
        applied = replace(applied, notes=(*applied.notes, note))
    optimizer = job.optimizer(applied.model.parameters())
    bind(applied, optimizer, world)
    scheduler = job.scheduler(optimizer) if job.scheduler else None
    state = RunState(applied.model, optimizer, scheduler, loss_scaler(world.device, plan.dtypes), job.seed)
    return applied, state


def _unkeyed(draws: StepDraws) -> tuple[str, ...]:
    if not draws.unkeyed:
        return ()
    return (
        f"--exact-random: {', '.join(sorted(draws.unkeyed))} cannot be keyed, so each rank draws on its own there.",
    )


def _data(job: Job, data: Any, what: str) -> Data:
    settings = LoaderSettings(job.collate, job.loader_workers, job.seed)
    return Data(count_samples(data, f"the {what} of job '{job.name}'"), reader(data, settings))


def _train(run: _Run) -> None:
    state, job = run.context.state, run.context.job
    run.context.applied.model.train()
    while state.epoch < job.epochs:
        run.stopped = _train_epoch(run)
        if run.stopped:
            break
        state.epoch, state.index = state.epoch + 1, 0
        if run.test is not None:
            run.metrics = evaluate(run.context, _test_batches(run, run.test))
            run.journal.evaluated(state.epoch - 1, job.epochs, state.step, run.metrics)


def _train_epoch(run: _Run) -> bool:
    """Train from where the state is to the end of the epoch. Returns whether all ranks stop before that."""
    state, job, journal, recorder = run.context.state, run.context.job, run.journal, run.context.recorder
    in_epoch = -(-state.index // job.batch_size)
    steps = in_epoch + -(-(run.train.samples - state.index) // job.batch_size)
    pace = _Pace(run.train.samples * job.epochs, run.samples)
    batches = _train_batches(run)
    stop, log_every = False, run.options.log_every or LOG_EVERY
    in_progress.add("an epoch")
    while in_epoch < steps:
        if not run.session.gate.begin():
            stop = True
            break
        recorder.begin_step(state.step + 1)
        with recorder.span("data", on_device=False):
            parts = next(batches)
        losses = train_step(run.context, parts)
        in_epoch += 1
        state.index = min(state.index + job.batch_size, run.train.samples)
        run.samples += parts[0][1].total
        recorder.samples = run.samples
        journal.note(state.epoch, state.step, losses)
        if in_epoch % log_every == 0 or in_epoch == steps:
            stop = journal.read(run.session.gate.wanted)
            journal.memory()
            _tell(run, "log", pace, in_epoch, steps)
            if stop:
                break
        elif journal.due():
            _tell(run, "progress", pace, in_epoch, steps)
        if run.options.save_every and state.step % run.options.save_every == 0:
            _save(run)
    journal.read()
    in_progress.clear()
    return stop


def _train_batches(run: _Run) -> Iterator[list[Part]]:
    """The microbatches of each step, on the device, with the next ones on their way."""
    state, job, world = run.context.state, run.context.job, run.context.world
    order = epoch_order(state.seed, state.epoch, run.train.samples)
    shares: list[list[BatchSlice]] = list(
        epoch_slices(order, job.batch_size, world, run.context.applied.plan.accumulate, state.index)
    )
    read = run.train.read((share.indices for step in shares for share in step), state.epoch)
    pairs = prefetch(zip(read, (share for step in shares for share in step), strict=True), world.device)
    for step in shares:
        yield [next(pairs) for _ in step]


def _test_batches(run: _Run, test: Data) -> Iterator[Part]:
    shares = sequential_slices(test.samples, run.context.job.batch_size, run.context.world)
    batches = test.read((share.indices for share in shares), 0)
    return prefetch(zip(batches, shares, strict=True), run.context.world.device)


class _Pace:
    """How fast the run goes now, and how long it still takes."""

    def __init__(self, samples: int, done: int) -> None:
        self._all = samples
        self._since, self._samples = time.perf_counter(), done

    def facts(self, done_now: int, behind: int) -> dict[str, float | None]:
        now = time.perf_counter()
        rate = (done_now - self._samples) / max(now - self._since, 1e-9)
        if now - self._since > 1.0:
            self._since, self._samples = now, done_now
        return {"samples_per_second": rate, "seconds_left": (self._all - behind) / rate if rate > 0 else None}


def _tell(run: _Run, kind: str, pace: _Pace, in_epoch: int, steps: int) -> None:
    if run.context.world.rank != 0:
        return
    state = run.context.state
    behind = state.epoch * run.train.samples + state.index
    facts = {"epoch": state.epoch + 1, "epochs": run.context.job.epochs, "step": in_epoch, "steps": steps}
    run.journal.tell(kind, **facts, loss=run.journal.last_loss, **pace.facts(run.samples, behind))


def _save(run: _Run) -> None:
    """Save the state: every rank gives its part, rank 0 writes. Collective."""
    state, folder = run.context.state, run.folder
    if folder is None or run.saved_step == state.step:
        return
    with run.context.recorder.span("checkpoint"):
        packed = pack(state)
        if packed is not None:
            save_checkpoint(folder / names.CHECKPOINTS, packed)
    run.saved_step = state.step


def _finish(run: _Run) -> None:
    """Save the state and, of a run that came to its end, the weights."""
    _save(run)
    if run.folder is not None and not run.stopped:
        save_weights(run.context.applied.model, run.folder / names.WEIGHTS)
    if run.session.channel is None:
        barrier()  # without a launcher nobody waits for rank 0's files


def _explain(error: BaseException, session: RankContext, run: _Run | None, recorder: Recorder) -> None:
    """Add to an error what its traceback does not say: rank, step, phase, and for memory how much of it."""
    if isinstance(error, MeshwiseError):
        return
    step = f"step {run.context.state.step + 1}" if run is not None else "before the first step"
    note_what_was_not_gathered(error)
    error.add_note(f"rank {session.world.rank}, {step}, phase {recorder.phase}")
    if is_out_of_memory(error):
        facts = ", ".join(f"{name} {bytes_text(value)}" for name, value in memory_facts(session.world.device).items())
        error.add_note(f"out of memory on {session.world.device}: {facts}. Use a smaller --batch-size or --accumulate.")


def is_out_of_memory(error: BaseException) -> bool:
    """Whether `error` says that a device or this host had no memory left."""
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    return isinstance(error, RuntimeError) and "can't allocate memory" in str(error)
