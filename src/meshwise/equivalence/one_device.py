"""The reference: a plain loop on one device that knows nothing of plans, with the microbatches of the plan.

It shares the order of the data with the rest of meshwise, and nothing else: what the training step gets wrong on any
number of devices is seen too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from meshwise.equivalence.model_state import (
    buffers_of,
    clean,
    gradients_of,
    learning_rates_of,
    optimizer_state_of,
    parameters_of,
    scheduler_numbers,
    tied_in,
)
from meshwise.equivalence.model_tracer import ModelTracer
from meshwise.equivalence.sketches import sketch
from meshwise.equivalence.trace import (
    CheckSpec,
    Named,
    StepTrace,
    Trace,
    batch_ranges,
    copied,
    microbatches,
    order_of,
    test_samples,
)
from meshwise.machine.memory import free_bytes
from meshwise.parallel.precision import cast_batch, computing, store_parameters
from meshwise.parallel.recompute import recomputed
from meshwise.spec.errors import UsageError
from meshwise.spec.units import bytes_text
from meshwise.training.job import Job
from meshwise.training.keyed import Rows
from meshwise.training.order import BatchSlice
from meshwise.training.source import LoaderSettings, Reader, count_samples, reader
from meshwise.training.weighing import as_weight, split_weight
from meshwise.transfer.prefetch import prefetch

STATE = 2  # tensors of a parameter's size that an optimizer keeps; Adam's
Means = dict[str, tuple[Tensor, Tensor]]
"""Name -> a mean and what it is over."""


@dataclass(frozen=True)
class _Reference:
    """The one device, ready to train."""

    job: Job
    spec: CheckSpec
    device: str
    model: nn.Module
    tracer: ModelTracer
    trace: Trace


def one_device(job: Job, spec: CheckSpec, device: str = "cpu") -> Trace:
    """Train `job` for the steps of `spec` in this process, and evaluate it."""
    with torch.random.fork_rng():
        torch.manual_seed(job.seed)
        model = job.model()
        store_parameters(model, spec.dtypes)
        model.to(device)
        check_room(model, spec, job)
        tracer = ModelTracer(model, job.seed, upcast=spec.in_float64)
        run = _Reference(job, spec, device, model, tracer, trace_of(model))
        _train(run)
        if job.test is not None:
            _evaluate(run, *opened(job, job.test(), "test set"))
    trace = run.trace
    trace.unkeyed, trace.random_modules = tracer.unkeyed, tracer.random_modules
    trace.evaluation_draws = tracer.evaluation_draws
    return trace


def check_room(model: nn.Module, spec: CheckSpec, job: Job) -> None:
    """Raises UsageError where the host's memory does not hold what a check keeps of a model of this size.

    Of each step both sides keep gradients, parameters and state in float64, and what is sent lies there twice.
    """
    size = 8 * sum(p.numel() for p in model.parameters())
    a_step = 2 + STATE + (job.clip_norm is not None)
    needed, free = 3 * size * (1 + spec.steps * a_step), free_bytes(torch.device("cpu"))
    if needed > free:
        fits = int((free / (3 * size) - 1) / a_step)
        instead = f"Use --steps {fits}, or" if fits >= 1 else "Use"
        raise UsageError(
            f"check keeps the results of {spec.steps} steps on both sides in float64: about {bytes_text(needed)} for a "
            f"model of {bytes_text(size)} in it, and {bytes_text(free)} are free. {instead} a model of the same "
            "layers with fewer or narrower ones."
        )


def trace_of(model: nn.Module) -> Trace:
    """A side before its first step. Collective where the model is divided."""
    kinds = {clean(name): type(module).__name__ for name, module in model.named_modules()}
    again = tuple(clean(name) for name in recomputed(model))
    return Trace(kinds, tied_in(model), parameters_of(model), buffers_of(model), recomputed_modules=again)


def opened(job: Job, data: Any, what: str) -> tuple[int, Reader]:
    """How many samples a data set of the job has, and how they are read."""
    settings = LoaderSettings(job.collate, job.loader_workers, job.seed)
    return count_samples(data, f"the {what} of job '{job.name}'"), reader(data, settings)


def _train(run: _Reference) -> None:
    job, model, tracer = run.job, run.model, run.tracer
    optimizer = job.optimizer(model.parameters())
    scheduler = job.scheduler(optimizer) if job.scheduler else None
    count, read = opened(job, job.data(), "training set")
    model.train()
    for number, batch in enumerate(batch_ranges(count, job.batch_size, run.spec)):
        step = StepTrace()
        parts = microbatches(batch, order_of(job.seed, batch, count), run.spec.plan.accumulate)
        step.samples = [[part.indices.tolist()] for part in parts]
        tracer.begin(number, [_all_rows(part) for part in parts])
        _backward(run, _batches(run, read, parts, batch.epoch), step)
        tracer.end_step(step)
        step.ready_order, step.gradients = list(dict.fromkeys(tracer.ready)), gradients_of(model)
        if job.clip_norm is not None:
            nn.utils.clip_grad_norm_(model.parameters(), job.clip_norm)
            step.clipped_gradients = gradients_of(model)
        step.learning_rates = learning_rates_of(optimizer)
        optimizer.step()
        model.zero_grad()  # also of what the optimizer does not hold
        if scheduler is not None:
            scheduler.step()
        step.optimizer_state, step.parameters = optimizer_state_of(optimizer, model), parameters_of(model)
        step.buffers, step.scheduler = buffers_of(model), scheduler_numbers(scheduler)
        run.trace.steps.append(step)


def _all_rows(part: BatchSlice) -> Rows:
    return Rows(0, part.samples, part.samples, part.samples)


def _batches(run: _Reference, read: Reader, parts: list[BatchSlice], epoch: int) -> list[tuple[Any, BatchSlice]]:
    pairs = zip(read((part.indices for part in parts), epoch), parts, strict=True)
    return [(cast_batch(batch, run.spec.dtypes), part) for batch, part in prefetch(pairs, run.device)]


def _weighed(result: Any, part: BatchSlice, where: str) -> tuple[Tensor, Tensor, bool]:
    """A mean, what it is over, and whether the job says what that is."""
    mean, weight = split_weight(result, part.samples, where)
    return mean, as_weight(part.samples if weight is None else weight, mean), weight is not None


def _backward(run: _Reference, batches: list[tuple[Any, BatchSlice]], step: StepTrace) -> None:
    """Leave in `.grad` the mean over all that the microbatches' weights count, and in `step` that of the losses."""
    total = weights = torch.zeros((), dtype=torch.float64)
    step.loss_has_weight = False
    sums: list[Named] = [{}]  # sketches of the gradients after each microbatch
    named = [(clean(name), p) for name, p in run.model.named_parameters()]
    for batch, part in batches:
        with run.tracer.forward(), computing(run.device, run.spec.dtypes):
            mean, weight, given = _weighed(run.job.loss(run.model, batch), part, f"job '{run.job.name}'")
        step.loss_has_weight = step.loss_has_weight or given
        with run.tracer.backward():
            (mean * weight.to(mean.dtype)).backward()
        total, weights = total + copied(mean) * weight.cpu(), weights + weight.cpu()
        sums.append({name: sketch(p.grad.double()) for name, p in named if p.grad is not None})
    for _, p in named:
        if p.grad is not None:
            p.grad /= float(weights)
    step.loss = float(total / weights)
    for before, after in pairwise(sums):
        step.microbatch_gradients.append({n: (s - before.get(n, 0.0)) / float(weights) for n, s in after.items()})


def _evaluate(run: _Reference, count: int, read: Reader) -> None:
    job, trace = run.job, run.trace
    order = torch.arange(test_samples(count, job.batch_size))
    run.model.eval()
    metrics = job.metrics or (lambda model, batch: {"loss": job.loss(model, batch)})
    parts = [BatchSlice(part, len(part), len(order)) for part in order.split(job.batch_size)]
    sums: Means = {}
    for part, means in _measured(run, run.tracer.keyed(metrics, [_all_rows(part) for part in parts]), read, parts):
        trace.evaluated += part.indices.tolist()
        for name, (mean, weight) in means.items():
            total, weights = sums.get(name, (0.0, 0.0))
            sums[name] = (total + mean * weight, weights + weight)
    trace.evaluation = {name: float(total / weights) for name, (total, weights) in sums.items()}
    trace.metric_sums = {name: (float(total), float(weights)) for name, (total, weights) in sums.items()}
    ends = sorted({int(part.indices[at]) for part in parts for at in (0, -1)})
    single = [BatchSlice(torch.tensor([index]), 1, len(order)) for index in ends]
    for index, (_, means) in zip(ends, _measured(run, run.tracer.precise(metrics), read, single), strict=True):
        for name, (mean, weight) in means.items():
            trace.single_sample_metrics.setdefault(name, {})[index] = (float(mean), float(weight))


def _measured(
    run: _Reference, metrics: Callable[..., Any], read: Reader, parts: list[BatchSlice]
) -> Iterator[tuple[BatchSlice, Means]]:
    """Metrics of each batch."""
    for batch, part in _batches(run, read, parts, 0):
        with torch.no_grad(), computing(run.device, run.spec.dtypes):
            results = metrics(run.model, batch)
        found = {}
        for name, result in results.items():
            mean, weight, _ = _weighed(result, part, f"metric '{name}' of job '{run.job.name}'")
            found[name] = (copied(mean), weight.cpu())
        yield part, found
