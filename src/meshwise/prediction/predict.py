"""Predict every sample once, in order, on any number of devices.

Predictions are written during the run. This code runs on every rank.

Each global batch is divided over the ranks as in an evaluation. Every few batches, rank 0 collects the rows of all
ranks and writes them. The number of batches depends on the time and the bytes of the last ones.
"""

from __future__ import annotations

import contextlib
import hashlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from meshwise.compat.tree import all_leaves
from meshwise.data.order import BatchSlice, epoch_slices
from meshwise.engine.engine import Engine
from meshwise.engine.seeds import seed_all, seed_draws
from meshwise.engine.steps import batches as read_batches
from meshwise.job.job import Job
from meshwise.job.run import Data, make_engine, open_data, read_parts
from meshwise.job.step import shapes_of
from meshwise.parallel.deferred import constructed
from meshwise.parallel.fits import check_fits
from meshwise.parallel.load import load_weights
from meshwise.parallel.own_draws import OF_DRAWS
from meshwise.prediction.files import InMemory, Lines, Outputs, PartialFolder, Pieces, Store, saying_what_is_kept
from meshwise.prediction.options import PredictOptions
from meshwise.prediction.rows import Predict, plain_call, rows_of
from meshwise.prediction.writer import Send, Writer
from meshwise.records import folder as names
from meshwise.recovery.loading import load
from meshwise.recovery.state import compare_states, load_model
from meshwise.spec.errors import CheckpointError, UsageError
from meshwise.spec.plan import Plan
from meshwise.transfer import collectives
from meshwise.workers.join import join

SAID = 5  # samples that are named where more have no number


def run_predict(
    job: Job, options: PredictOptions, origin: Mapping[str, str], send: Send | None = None
) -> dict[str, Any]:
    """Run the predictions as one of several ranks. Return a summary of what was done. If the outputs are kept in
    memory, the summary contains them. Collective.

    origin: digests of the job's source file or model.
    send: called with notes and progress. By default they are sent to the launcher.

    Raises UsageError if the job cannot be predicted.
    """
    session = join()
    plan = options.run_options.plan_on(session.world.size)
    check_fits(plan, session.world)
    say = send or (session.channel.send if session.channel is not None else _nobody)
    first = session.world.rank == 0

    def note(text: str) -> None:
        if first and text not in OF_DRAWS:  # nothing is dropped here
            say("note", text=text)

    engine = make_engine(session, plan, note)
    try:
        data = open_data(job, data_of(job, options)(), "data", engine)
        model, call = predicting(job, plan, engine, options.weights)
        if options.weights is None and isinstance(options.job, str | Job):
            engine.notify("no weights are given, so the model is as the job builds it. Give weights with --weights")
        out, began = None if options.out is None else Path(options.out), time.perf_counter()
        with _stored(first, out) as store:
            facts = {**origin, **_facts(job, data, plan, options)} if first and out is not None else {}
            done = _begun(store, facts, options, job.batch_size, engine)
            say("begun", samples=data.samples)
            if done:
                engine.notify(f"going on after {done:,} of {data.samples:,} samples")
            with Writer(store, out, plan, session.world.rank, done, say) as writer:
                predict_rows(engine, job, model, call, data, writer)
            with saying_what_is_kept(out):
                outputs = store.finish() if first and not engine.stopped else None
            seconds = time.perf_counter() - began
        collectives.barrier(collectives.everyone())
    finally:
        engine.close()
    return {
        "samples": data.samples,
        "done": writer.written,
        "computed": writer.written - done,
        "nan": writer.nan,
        "seconds": seconds,
        "outputs": outputs,
        "notes": tuple(engine.notes),
    }


def _nobody(kind: str, **facts: Any) -> None:
    """Ignore a message. Used if there is no launcher."""


def data_of(job: Job, options: PredictOptions) -> Callable[[], Any]:
    """Return the function that opens the data to predict. This is the job's test set. It is the training set if the job
    has no test set, or with `--train`."""
    found = job.data if options.train or job.test is None else job.test
    return cast("Callable[[], Any]", found)


def predicting(job: Job, plan: Plan, engine: Engine, weights: str | Path | None) -> tuple[nn.Module, Predict]:
    """Return the job's model under `plan` in eval mode, with weights loaded, and the function that calls the model on a
    batch. Collective."""
    seed_all(job.seed)
    model, note = constructed(job.model) if plan.parameters_divided else (job.model(), "")
    if not isinstance(model, nn.Module):
        raise UsageError(
            f"job '{job.name}': the model is a {type(model).__name__}. Use an nn.Module or a function that returns one."
        )
    engine.notify(note)
    call = job.predict or plain_call(model, engine.notify)
    state = _load(model, Path(weights)) if weights is not None else None
    engine.add_models([model], plan)
    if state is not None:
        saved = load(state, join().world, engine.notify).tree["model"]
        compare_states(model.state_dict(), saved)
        load_model(model, saved)
    return model.eval(), call


def _load(model: nn.Module, path: Path) -> Path | None:
    """Load weights from a file, a folder or the folder of a run into the model.

    Returns None if weights were loaded. A run that has not finished has no weights yet. For such a run, load nothing
    and return its folder of checkpoints. Raises CheckpointError if this folder does not exist.
    """
    if not (path / names.RUN).exists():
        load_weights(model, path)
        return None
    if (path / names.WEIGHTS).exists():
        load_weights(model, path / names.WEIGHTS)
        return None
    if not (path / names.CHECKPOINTS).exists():
        raise CheckpointError(f"{path}: this run has no weights and no checkpoint. Continue it, or use another run.")
    return path / names.CHECKPOINTS


def predict_rows(engine: Engine, job: Job, model: nn.Module, call: Predict, data: Data, writer: Writer) -> None:
    """Predict all samples from index `writer.written` on, and pass their rows to the writer. Collective."""
    world, at = engine.world, writer.written
    slices = epoch_slices(torch.arange(data.samples), job.batch_size, world, begin=at)
    batches = read_parts(data, (parts[0] for parts in slices), 0, world.device)
    with torch.no_grad():
        for batch, part in read_batches(engine, "the predictions", batches, job.batch_size):
            engine.part = part
            seed_draws(world, job.seed, at)
            with engine.computing():
                rows = _rows(engine, job, model, call, batch, part)
            at += part.total
            writer.take(rows, part.indices, at)
    writer.flush(at)


def _rows(engine: Engine, job: Job, model: nn.Module, call: Predict, batch: Any, part: BatchSlice) -> Outputs:
    """Return the predicted rows of a batch. In a pipeline, only ranks of the last stage have them. Collective."""
    pipeline, cast = engine.program.pipeline, engine.cast(batch)
    if pipeline is None:
        return rows_of(call(model, cast), part, job.name)
    found: Outputs = {}
    for action in pipeline.begin_forward(shapes_of(batch)):
        _, rows = pipeline.run(action, lambda: rows_of(call(model, cast), part, job.name))
        found = rows or found
    pipeline.finish_forward()
    return found


@contextlib.contextmanager
def _stored(first: bool, out: Path | None) -> Iterator[Store]:
    """Yield the store for predictions. On ranks other than the first, this is a store in memory that stays empty."""
    if out is None or not first:
        yield InMemory()
        return
    folder = PartialFolder(out)
    try:
        yield Lines(folder) if out.suffix == ".jsonl" else Pieces(folder)
    finally:
        folder.close()


def _begun(store: Store, facts: dict[str, Any], options: PredictOptions, batch: int, engine: Engine) -> int:
    """Open the store, and return how many samples it already has. If this fails on rank 0, every rank raises the same
    error. Collective."""
    done, wrong, note = 0, None, ""
    if isinstance(store, Lines | Pieces):
        try:
            with saying_what_is_kept(store.folder.out):
                note = store.folder.open(facts, overwrite=options.overwrite)
                done = store.begin(batch)
        except UsageError as error:
            wrong = str(error)
    done, wrong, note = collectives.broadcast_object((done, wrong, note), collectives.everyone())
    if wrong:
        raise UsageError(wrong)
    engine.notify(note)
    return int(done)


def _facts(job: Job, data: Data, plan: Plan, options: PredictOptions) -> dict[str, Any]:
    """Return the facts on which the outputs depend, such as the job, the data and the weights. The program itself is
    not included. A stopped run can only be continued with equal facts."""
    ends = torch.tensor([0, data.samples // 2, data.samples - 1])
    weights = None if options.weights is None else digest_of_file(Path(options.weights))
    return {
        "job": job.name,
        "samples": data.samples,
        "data": digest_of(list(all_leaves(next(iter(data.read([ends], 0)))))),
        "weights": weights,
        "seed": job.seed,
        "arguments": list(options.args),
        "precision": f"{plan.dtypes.stored} computed in {plan.dtypes.computed}",
    }


def digest_of(leaves: Sequence[Any]) -> str:
    """Return a digest of tensors and plain values."""
    digest = hashlib.sha256()
    for leaf in leaves:
        if isinstance(leaf, Tensor):
            digest.update(leaf.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
        elif isinstance(leaf, str | int | float | bytes):
            digest.update(repr(leaf).encode())
    return digest.hexdigest()[:16]


def digest_of_file(path: Path) -> str:
    """Return a digest of about 64 excerpts of each weights file at `path`. It changes with training, but not if the
    folder is moved."""
    digest = hashlib.sha256()
    for file in sorted(path.rglob("*.safetensors")) or sorted(path.rglob("step-*.pt")) if path.is_dir() else [path]:
        size = file.stat().st_size
        with file.open("rb") as opened:
            for place in range(0, size, max(size // 64, 1)):
                opened.seek(place)
                digest.update(opened.read(4096))
    return digest.hexdigest()[:16]
