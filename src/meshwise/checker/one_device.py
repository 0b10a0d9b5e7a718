"""Train on one device without a plan, as the reference.

The training is a plain loop, with the microbatches of the plan.

It shares only the order of the data with the rest of meshwise, so a check also finds mistakes in meshwise's own
training step.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from meshwise.checker import model_state
from meshwise.checker.model_tracer import ModelTracer
from meshwise.checker.noise import take_noise
from meshwise.checker.trace import Batches, CheckSpec, Reading, StepTrace, Trace, microbatches, test_samples
from meshwise.checker.upcast import called_in_float64, plain_attention
from meshwise.hardware.memory import free_bytes
from meshwise.parallel.precision import cast_batch, computing, store_parameters
from meshwise.parallel.step_hooks import needs_closure
from meshwise.spec.errors import UsageError
from meshwise.spec.units import bytes_text
from meshwise.training.data.keyed import Rows
from meshwise.training.data.order import BatchSlice
from meshwise.training.engine.engine import Microbatch
from meshwise.training.engine.seeds import seed_all
from meshwise.training.engine.weighing import as_weight, split_weight
from meshwise.training.job.job import Job
from meshwise.training.job.run import Data, open_data, read_parts

STATE = 2  # assumed number of state tensors per parameter, as in Adam


@dataclass(frozen=True)
class _Reference:
    """The training that runs on one device: the job, the model and its tracer."""

    job: Job
    spec: CheckSpec
    device: str
    model: nn.Module
    tracer: ModelTracer


def one_device(job: Job, spec: CheckSpec, device: str = "cpu") -> Trace:
    """Train `job` in this process for the steps of `spec`, evaluate it, and return the trace."""
    with torch.random.fork_rng(), called_in_float64(spec.in_float64), plain_attention():
        seed_all(job.seed)
        model = job.model()
        store_parameters(model, spec.dtypes)
        model.to(device)
        check_room(model, spec, job)
        run = _Reference(job, spec, device, model, ModelTracer(model, job.seed, upcast=spec.in_float64))
        _train(run, None if job.test is None else open_data(job, job.test(), "test set"))
    return run.tracer.trace


def check_room(model: nn.Module, spec: CheckSpec, job: Job) -> None:
    """Raise UsageError if the host has too little free memory to check a model of this size."""
    size = 8 * sum(p.numel() for p in model.parameters())
    a_step = 2 + STATE + (job.clip_norm is not None)
    steps = spec.steps_of(job)
    needed, free = 3 * size * (1 + steps * a_step), free_bytes(torch.device("cpu"))
    if needed > free:
        fits = int((free / (3 * size) - 1) / a_step)
        instead = f"Use --steps {max(fits - steps + spec.steps, 1)}, or" if fits >= 1 else "Use"
        raise UsageError(
            f"check keeps the results of {steps} steps in float64, on one device and under the plan. This takes about "
            f"{bytes_text(needed)} for this model of {bytes_text(size)}, but only {bytes_text(free)} are free. "
            f"{instead} a model with fewer or narrower layers."
        )


def _train(run: _Reference, test: Data | None) -> None:
    """Train for all steps. Evaluate before the step that begins another epoch, and at the end."""
    job, model = run.job, run.model
    optimizer = job.optimizer(model.parameters())
    scheduler = job.scheduler(optimizer) if job.scheduler else None
    data = open_data(job, job.data(), "training set")
    model.train()
    order = Batches(job.seed, data.samples, job.batch_size, run.spec)
    for number, (epoch, batch) in enumerate(order.of(run.spec.steps_of(job))):
        if 0 < number == run.spec.steps - 1:
            _evaluate(run, test)
            model.train()
        step = run.tracer.begin(number)
        parts = microbatches(batch, run.spec.plan.accumulate)
        closure = partial(_closure, run, _batches(run, data, parts, epoch), step)
        step.learning_rates = model_state.learning_rates_of(optimizer)
        if needs_closure(optimizer):
            optimizer.step(closure)
        else:
            closure()
            step.clipped_gradients = model_state.gradients_of(model) if job.clip_norm is not None else {}
            optimizer.step()
        take_noise(model, run.spec.noise, number)
        model.zero_grad()  # also clears parameters that the optimizer does not hold
        if scheduler is not None:
            scheduler.step()
        step.optimizer_state = model_state.optimizer_state_of(optimizer, model)
        step.parameters, step.buffers = model_state.parameters_of(model), model_state.buffers_of(model)
        step.scheduler = model_state.scheduler_numbers(scheduler)
        run.tracer.trace.steps.append(step)
    _evaluate(run, test)


def _closure(run: _Reference, batches: list[Microbatch], step: StepTrace) -> float:
    """Compute the loss and the clipped gradients, and return the loss."""
    run.model.zero_grad()
    run.tracer.forget_gradients()
    step.samples += [[part.indices.tolist()] for _, part in batches]
    loss = _backward(run, batches, step)
    step.loss += loss
    step.gradients = model_state.gradients_of(run.model)
    if run.job.clip_norm is not None:
        nn.utils.clip_grad_norm_(run.model.parameters(), run.job.clip_norm)
    return loss


def _all_rows(part: BatchSlice) -> Rows:
    return Rows(0, part.samples, part.samples, part.samples)


def _batches(run: _Reference, data: Data, slices: list[BatchSlice], epoch: int) -> list[Microbatch]:
    return [(cast_batch(batch, run.spec.dtypes), part) for batch, part in read_parts(data, slices, epoch, run.device)]


def _weighed(result: Any, part: BatchSlice, where: str, summed: int | None) -> tuple[Tensor, Tensor]:
    """Return (mean, weight) from the result of a job's loss or metric function."""
    mean, weight = split_weight(result, part, where, summed=summed)
    return mean, as_weight(part.samples if weight is None else weight, mean)


def _backward(run: _Reference, batches: list[Microbatch], step: StepTrace) -> float:
    """Compute the gradient of the weighted mean loss over all microbatches, and leave it in `.grad`."""
    total = weights = torch.zeros((), dtype=torch.float64)
    for batch, part in batches:
        with run.tracer.forward(_all_rows(part), batch, Reading()), computing(run.device, run.spec.dtypes):
            summed = part.total if run.job.reduction == "sum" else None
            mean, weight = _weighed(run.job.loss(run.model, batch), part, f"job '{run.job.name}'", summed)
        run.tracer.loss_made(mean)
        with run.tracer.backward():
            (mean * weight.to(mean.dtype)).backward()
        total, weights = total + model_state.copied(mean) * weight.cpu(), weights + weight.cpu()
    for p in run.model.parameters():
        if p.grad is not None:
            p.grad /= float(weights)
    return float(total / weights)


def _evaluate(run: _Reference, data: Data | None) -> None:
    """Evaluate the test set, and record its metrics in the trace in place of earlier ones."""
    if data is None:
        return
    job, trace = run.job, run.tracer.trace
    trace.evaluated = []
    order = torch.arange(test_samples(data.samples, job.batch_size, run.spec))
    run.model.eval()
    parts = [BatchSlice(part, len(part), len(order)) for part in order.split(job.batch_size)]
    metrics = job.metrics or (lambda model, batch: {"loss": job.loss(model, batch)})
    measure = run.tracer.keyed(metrics, [_all_rows(part) for part in parts])
    summed = 1 if job.reduction == "sum" and not job.metrics else None
    sums: dict[str, tuple[Any, Any]] = {}
    for batch, part in _batches(run, data, parts, 0):
        with torch.no_grad(), computing(run.device, run.spec.dtypes):
            results = measure(run.model, batch)
        trace.evaluated += part.indices.tolist()
        for name, result in results.items():
            mean, weight = _weighed(result, part, f"metric '{name}' of job '{job.name}'", summed)
            total, weights = sums.get(name, (0.0, 0.0))
            sums[name] = (total + model_state.copied(mean) * weight.cpu(), weights + weight.cpu())
    trace.evaluation = {name: float(total / weights) for name, (total, weights) in sums.items()}
