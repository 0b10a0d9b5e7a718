"""Evaluate: count every sample once, on any number of devices."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from meshwise.reports.recorder import current
from meshwise.training.data.order import BatchSlice
from meshwise.training.engine.engine import Engine, Microbatch
from meshwise.training.engine.weighing import as_weight, split_weight
from meshwise.training.job.job import Job
from meshwise.training.job.step import shapes_of
from meshwise.transfer import collectives

Sum = tuple[Tensor, Tensor]
"""For one metric: (mean, weight) of a batch, or (sum of mean * weight, sum of weights) of several batches."""


def evaluate(engine: Engine, job: Job, model: nn.Module, batches: Iterable[Microbatch]) -> dict[str, float]:
    """Return the job's metrics over the whole test set, or only the loss if the job has no metrics. Collective.

    Padding samples have weight 0. First, rank 0 sends its model's buffers, such as running statistics, to all ranks.
    """
    collectives.broadcast_tensors(list(model.buffers()))
    sums: dict[str, Sum] = {}
    training = model.training
    model.eval()
    with torch.no_grad(), current().span("evaluate"):
        for batch, part in batches:
            engine.part = part
            current().come_to("evaluate")
            with engine.computing():
                measured = on_batch(engine, batch, partial(_measure, job, model, part))
            for name, (value, weight) in measured.items():
                total, weights = sums.get(name, (0.0, 0.0))
                sums[name] = (total + value * weight, weights + weight)
        engine.part = None
        result = _over_ranks(engine, sums)
    model.train(training)
    return result


def on_batch(engine: Engine, batch: Any, call: Callable[[Any], dict[Any, Any]]) -> dict[Any, Any]:
    """Return the result of `call` for a batch, cast to the plan's dtype. A pipeline runs all its stages."""
    pipeline, cast = engine.program.pipeline, engine.cast(batch)
    if pipeline is None:
        return call(cast)
    found: dict[Any, Any] = {}
    for action in pipeline.begin_forward(shapes_of(batch)):
        _, result = pipeline.run(action, lambda: call(cast))
        found = result or found
    pipeline.finish_forward()
    return found


def _measure(job: Job, model: nn.Module, part: BatchSlice, batch: Any) -> dict[str, Sum]:
    named = job.metrics(model, batch) if job.metrics else {"loss": job.loss(model, batch)}
    summed = 1 if job.reduction == "sum" and not job.metrics else None
    measured = {}
    for name, result in named.items():
        mean, weight = split_weight(result, part, f"metric '{name}' of job '{job.name}'", summed=summed)
        known = as_weight(float(part.samples) if weight is None else weight, mean)
        measured[name] = (mean.to(known.dtype), known)
    return measured


def _over_ranks(engine: Engine, sums: dict[str, Sum]) -> dict[str, float]:
    held = {name: (float(value), float(weight)) for name, (value, weight) in sums.items()}
    pipeline = engine.program.pipeline
    if pipeline is not None:
        held = collectives.gather_objects(held, pipeline.pipe.group)[pipeline.last_rank]
    ranks = collectives.gather_objects(held)
    totals = {name: [sum(column) for column in zip(*(rank[name] for rank in ranks), strict=True)] for name in held}
    return {name: total / weight for name, (total, weight) in totals.items()}
