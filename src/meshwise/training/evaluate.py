"""Evaluate: every sample counts once, on any number of devices."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from meshwise.timeline.record import current
from meshwise.training.engine import Engine, Part
from meshwise.training.job import Job
from meshwise.training.weighing import as_weight, split_weight
from meshwise.transfer import collectives


def evaluate(engine: Engine, job: Job, model: nn.Module, batches: Iterable[Part]) -> dict[str, float]:
    """The job's metrics over the whole test set; its loss where it has none. Collective.

    A padding sample weighs nothing. Buffers (running statistics) are those of rank 0.
    """
    collectives.broadcast_tensors(list(model.buffers()))
    sums: dict[str, Tensor] = {}
    training = model.training
    model.eval()
    with torch.no_grad(), current().span("evaluate"):
        for batch, part in batches:
            engine.part = part
            with engine.computing():
                measured = measure(job, model, engine.cast(batch), part.samples)
            for name, pair in measured.items():
                sums[name] = sums[name] + pair if name in sums else pair
        engine.part = None
        table = collectives.sum_over_ranks(torch.stack(list(sums.values()))).tolist() if sums else []
    model.train(training)
    return {name: total / weight for name, (total, weight) in zip(sums, table, strict=True)}


def measure(job: Job, model: nn.Module, batch: Any, samples: int) -> dict[str, Tensor]:
    """Of each metric of a batch its value times its weight, and its weight: shape (2,)."""
    named = job.metrics(model, batch) if job.metrics else {"loss": job.loss(model, batch)}
    measured = {}
    for name, result in named.items():
        mean, weight = split_weight(result, samples, f"metric '{name}' of job '{job.name}'")
        known = as_weight(float(samples) if weight is None else weight, mean)
        measured[name] = torch.stack([mean.to(known.dtype) * known, known])
    return measured
