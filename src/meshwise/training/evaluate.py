"""Evaluate: every sample counts once, on any number of devices."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from meshwise.parallel.precision import cast_batch, computing
from meshwise.training.job import Job
from meshwise.training.order import BatchSlice
from meshwise.training.step import StepContext
from meshwise.training.weighing import as_weight, split_weight
from meshwise.transfer import collectives


def evaluate(run: StepContext, batches: Iterable[tuple[Any, BatchSlice]]) -> dict[str, float]:
    """The job's metrics over the whole test set; its loss where it has none. Collective.

    A stand-in weighs nothing. Buffers (running statistics) are those of rank 0.
    """
    model = run.applied.model
    collectives.broadcast_tensors(list(model.buffers()))
    sums: dict[str, tuple[Tensor, Tensor]] = {}
    training = model.training
    model.eval()
    with torch.no_grad(), run.recorder.span("evaluate"):
        for batch, share in batches:
            run.state.counts = share.samples > 0
            for name, (value, weight) in _measure(run, batch, share).items():
                total, weights = sums.get(name, (0.0, 0.0))
                sums[name] = (total + value * weight, weights + weight)
        result = _over_ranks(sums)
    model.train(training)
    return result


def _measure(run: StepContext, batch: Any, share: BatchSlice) -> dict[str, tuple[Tensor, Tensor]]:
    job: Job = run.job
    dtypes = run.applied.plan.dtypes
    with computing(run.world.device, dtypes):
        batch = cast_batch(batch, dtypes)
        named = job.metrics(run.applied.model, batch) if job.metrics else {"loss": job.loss(run.applied.model, batch)}
    measured = {}
    for name, result in named.items():
        mean, weight = split_weight(result, share.samples, f"metric '{name}' of job '{job.name}'")
        known = float(share.samples) if weight is None else weight
        measured[name] = (mean.double() if mean.device.type != "mps" else mean, as_weight(known, mean))
    return measured


def _over_ranks(sums: dict[str, tuple[Tensor, Tensor]]) -> dict[str, float]:
    if not sums:
        return {}
    table = torch.stack([torch.stack(pair) for pair in sums.values()])  # (metrics, 2)
    collectives.all_reduce(table)
    return {name: float(total / weight) for name, (total, weight) in zip(sums, table.tolist(), strict=True)}
