"""Predict every sample once, in order, on any number of devices.

This code runs on every rank. Each rank predicts one range of the samples, in batches of the same sizes as in an
evaluation, and writes the rows in parts. At the end, rank 0 joins the parts of all ranks.
"""

from __future__ import annotations

import contextlib
import hashlib
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from meshwise.parallel.deferred import constructed
from meshwise.parallel.fits import check_fits
from meshwise.parallel.load import load_weights
from meshwise.parallel.rng_notes import OF_DRAWS
from meshwise.spec.plan import Plan
from meshwise.spec.world import World
from meshwise.torch_compat.tree import all_leaves
from meshwise.training.data.order import BatchSlice, batch_slices
from meshwise.training.engine.engine import Engine
from meshwise.training.engine.seeds import seed_all, seed_draws
from meshwise.training.engine.steps import batches as read_batches
from meshwise.training.job.evaluate import on_batch
from meshwise.training.job.job import Job
from meshwise.training.job.run import Data, make_engine, open_data, read_parts
from meshwise.training.prediction.options import PredictOptions
from meshwise.training.prediction.parts import (
    Outputs,
    Predict,
    folder_of,
    join_parts,
    left_of,
    locked_folder,
    merged,
    plain_call,
    rows_of,
    write_parts,
)
from meshwise.transfer import collectives
from meshwise.workers.join import join

PART_SECONDS = 10
"""Seconds between two parts, and between two lines of progress. A kill loses about this much work."""


@dataclass(frozen=True)
class Predictions:
    """The result of `mw.predict`.

    outputs: the model's outputs for all samples, in the order of the data set. This is a tensor with one row per
        sample, or a list of rows if they cannot form a tensor. If the model returns a dict or tuple, this is a dict or
        tuple of such tensors or lists. None if the outputs were written to a file.
    samples: the number of samples in the data set.
    computed: the number of samples that this call computed. It is below `samples` if the call continued an earlier
        call.
    """

    samples: int
    computed: int
    outputs: Any
    path: Path | None
    seconds: float
    notes: tuple[str, ...]


def run_predict(job: Job, options: PredictOptions) -> Predictions:
    """Run the predictions as one of several ranks, and return this rank's share of the result. `whole` joins the shares
    of all ranks. Collective.

    Raises UsageError if the job cannot be predicted.
    """
    session, out = join(), None if options.out is None else Path(options.out)
    plan, first = options.run_options.plan_on(session.world.size), session.world.rank == 0
    check_fits(plan, session.world)

    def say(text: str) -> None:
        if first and text not in OF_DRAWS:  # predictions use no dropout, so notices on draws do not apply
            print(text, file=sys.stderr, flush=True)

    engine = make_engine(session, plan, say)
    with contextlib.ExitStack() as stack:
        stack.callback(engine.close)
        data = open_data(job, (job.data if options.train or job.test is None else job.test)(), "data", engine)
        model, call = predicting(job, plan, engine, options.weights)
        if options.weights is None and isinstance(options.job, str | Job):
            engine.notify("no weights are given, so the model is as the job builds it. Give weights with --weights")
        began = told = time.perf_counter()
        if out is not None and first:
            stack.enter_context(locked_folder(out, _facts(job, data, plan, options), overwrite=options.overwrite))
            say(f"parts are written to {folder_of(out)}: after a stop, the same command continues")
        left = collectives.tell_all(left_of(data.samples, out) if first else None)
        earlier = done = data.samples - len(left)
        # The ranks of a replica have the same rows, so only the first of them writes.
        writes = session.world.rank % (plan.within_samples // plan.pipeline) == 0
        pieces, indices, world = list[Outputs](), list[Tensor](), engine.world
        batches = read_parts(data, own_slices(left, job.batch_size, world), 0, world.device)
        stack.enter_context(torch.no_grad())
        for batch, part in read_batches(engine, "the predictions", batches, job.batch_size):
            engine.part = part
            seed_draws(world, job.seed, done)
            with engine.computing():
                rows = on_batch(engine, batch, partial(rows_of, job.name, model, call, part))
            done += part.total
            if writes and rows and part.samples:
                pieces.append(rows)
                indices.append(part.indices)
            if time.perf_counter() - told > PART_SECONDS:
                told = time.perf_counter()
                say(f"{done:,} of {data.samples:,} samples ({done / data.samples:.0%})")
                if out is not None and pieces:
                    write_parts(out, indices, pieces)
                    pieces, indices = [], []
        if out is not None and pieces:
            write_parts(out, indices, pieces)
        if engine.stopped:
            raise KeyboardInterrupt(f"stopped after {done:,} of {data.samples:,} samples")
        collectives.barrier(collectives.everyone())
        if out is not None and first:
            join_parts(out, data.samples)
        collectives.barrier(collectives.everyone())
    outputs, seconds = pieces if out is None else [], time.perf_counter() - began
    return Predictions(data.samples, done - earlier, outputs, out, seconds, tuple(engine.notes))


def whole(shares: Sequence[Predictions]) -> Predictions:
    """Return the result of all ranks, whose shares are given in rank order."""
    pieces = [piece for share in shares for piece in share.outputs]
    named = merged(pieces) if pieces else {"": None}
    outputs = named[""] if "" in named else tuple(named.values()) if 0 in named else named
    return replace(shares[0], outputs=outputs)


def predicting(job: Job, plan: Plan, engine: Engine, weights: str | Path | None) -> tuple[nn.Module, Predict]:
    """Return the job's model under `plan` in eval mode, with weights loaded, and the function that calls the model on a
    batch. Collective."""
    seed_all(job.seed)
    model, note = constructed(job.model) if plan.parameters_divided else (job.model(), "")
    engine.notify(note)
    call = job.predict or plain_call(model, engine.notify)
    if weights is not None:
        load_weights(model, weights)
    engine.add_models([model], plan)
    return model.eval(), call


def own_slices(left: Tensor, batch_size: int, world: World) -> Iterator[BatchSlice]:
    """Yield this rank's part of each global batch. All its parts together are one range of `left`."""
    positions = torch.arange(len(left))
    at = sum(part.first for part in batch_slices(positions, batch_size, world))  # how many samples lower ranks have
    for part in batch_slices(positions, batch_size, world):
        yield replace(part, indices=left[at : at + part.samples] if part.samples else left[part.indices])
        at += part.samples


def _facts(job: Job, data: Data, plan: Plan, options: PredictOptions) -> dict[str, Any]:
    """Return the facts on which the outputs depend, except the program itself."""
    ends = torch.tensor([0, data.samples // 2, data.samples - 1])
    weights: list[Any] = list(options.job.state_dict().values()) if isinstance(options.job, nn.Module) else []
    if options.weights is not None:
        path = Path(options.weights)
        files = [file.stat() for file in ([path] if path.is_file() else sorted(path.glob("*.safetensors")))]
        weights += [f"{file.st_size} bytes at {file.st_mtime}" for file in files]
    return {
        "job": job.name,
        "samples": data.samples,
        "data": digest_of(all_leaves(next(iter(data.read([ends], 0))))),
        "weights": digest_of(weights),
        "seed": job.seed,
        "arguments": list(options.args),
        "precision": f"{plan.dtypes.stored} computed in {plan.dtypes.computed}",
    }


def digest_of(values: Iterable[Any]) -> str:
    """Return a digest of plain values, and of up to 4096 elements of each tensor."""
    some = [v.flatten()[:: v.numel() // 4096 + 1].tolist() if isinstance(v, Tensor) else v for v in values]
    plain = [value for value in some if isinstance(value, list | str | bytes | int | float)]
    return hashlib.sha256(repr(plain).encode()).hexdigest()[:16]
