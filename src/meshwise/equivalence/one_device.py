"""The reference: a plain loop on one device that knows nothing of plans, with the microbatches of the plan.

It shares the order of the data with the rest of meshwise, and nothing else: what the training step gets wrong on any
number of devices is seen too.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from meshwise.equivalence.prints import print_of
from meshwise.equivalence.seen import (
    Ask,
    Cut,
    Named,
    Side,
    Step,
    cuts_of,
    microbatches,
    order_of,
    plain,
    test_samples,
)
from meshwise.equivalence.watch import (
    Watch,
    buffers_of,
    clean,
    gradients_of,
    optimizer_state_of,
    parameters_of,
    rates_of,
    scheduler_numbers,
    tied_in,
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


def one_device(job: Job, ask: Ask, device: str = "cpu") -> Side:
    """Train `job` for the steps of `ask` in this process, and evaluate it."""
    with torch.random.fork_rng():
        return _run(job, ask, device)


def _run(job: Job, ask: Ask, device: str) -> Side:
    torch.manual_seed(job.seed)
    model = job.model()
    store_parameters(model, ask.dtypes)
    model.to(device)
    check_room(model, ask, job)
    optimizer = job.optimizer(model.parameters())
    scheduler = job.scheduler(optimizer) if job.scheduler else None
    watch = Watch(model, job.seed, lift=ask.lifted)
    side = begun_side(model)
    samples, read = opened(job, job.data(), "training set")
    loss = watch.loss(job.loss)
    model.train()
    for number, cut in enumerate(cuts_of(samples, job.batch_size, ask)):
        step = Step()
        shares = microbatches(cut, order_of(job.seed, cut, samples), ask.plan.accumulate)
        step.samples = [[share.indices.tolist()] for share in shares]
        watch.begin(number, [Rows(0, share.samples, share.samples, share.samples) for share in shares])
        _backward(loss, model, watch, _batches(read, shares, cut, device), ask, job.name, step)
        step.outputs, step.draws = watch.outputs, watch.draws
        step.ready, step.gradients = list(dict.fromkeys(watch.ready)), gradients_of(model)
        if job.clip_norm is not None:
            nn.utils.clip_grad_norm_(model.parameters(), job.clip_norm)
            step.clipped = gradients_of(model)
        step.rates = rates_of(optimizer)
        optimizer.step()
        model.zero_grad()  # also of what the optimizer does not hold
        if scheduler is not None:
            scheduler.step()
        step.optimizer, step.parameters = optimizer_state_of(optimizer, model), parameters_of(model)
        step.buffers, step.scheduler = buffers_of(model), scheduler_numbers(scheduler)
        side.steps.append(step)
    _evaluate(job, model, watch, side, ask, device)
    side.unkeyed, side.drawing, side.evaluation_draws = watch.unkeyed, watch.drawing, watch.evaluation_draws
    return side


def check_room(model: nn.Module, ask: Ask, job: Job) -> None:
    """Raises UsageError where the host's memory does not hold what a check keeps of a model of this size.

    Of each step both sides keep gradients, parameters and state in float64, and what is sent lies there twice.
    """
    size = 8 * sum(p.numel() for p in model.parameters())
    a_step = 2 + STATE + (job.clip_norm is not None)
    needed, free = 3 * size * (1 + ask.steps * a_step), free_bytes(torch.device("cpu"))
    if needed > free:
        fits = int((free / (3 * size) - 1) / a_step)
        instead = f"Use --steps {fits}, or" if fits >= 1 else "Use"
        raise UsageError(
            f"check keeps what {ask.steps} steps leave on both sides in float64: about {bytes_text(needed)} for a "
            f"model of {bytes_text(size)} in it, and {bytes_text(free)} are free. {instead} a model of the same "
            "layers with fewer or narrower ones."
        )


def begun_side(model: nn.Module) -> Side:
    """A side before its first step."""
    kinds = {clean(name): type(module).__name__ for name, module in model.named_modules()}
    again = tuple(clean(name) for name in recomputed(model))
    return Side(kinds, tied_in(model), parameters_of(model), buffers_of(model), recomputed=again)


def opened(job: Job, data: Any, what: str) -> tuple[int, Reader]:
    """How many samples a data set of the job has, and how they are read."""
    settings = LoaderSettings(job.collate, job.loader_workers, job.seed)
    return count_samples(data, f"the {what} of job '{job.name}'"), reader(data, settings)


def _batches(read: Reader, shares: list[BatchSlice], cut: Cut, device: str) -> list[tuple[Any, BatchSlice]]:
    pairs = zip(read((share.indices for share in shares), cut.epoch), shares, strict=True)
    return list(prefetch(pairs, device))


def _backward(
    loss: Any, model: nn.Module, watch: Watch, batches: list[tuple[Any, BatchSlice]], ask: Ask, name: str, step: Step
) -> None:
    """Leave in `.grad` the mean over all that the microbatches' weights count, and in `step` that of the losses."""
    total = weights = torch.zeros((), dtype=torch.float64)
    step.weighed = False
    sums: list[Named] = []  # prints of the gradients after each microbatch
    for batch, share in batches:
        with computing(str(next(model.parameters()).device), ask.dtypes):
            mean, weight = split_weight(loss(model, cast_batch(batch, ask.dtypes)), share.samples, f"job '{name}'")
        step.weighed = step.weighed or weight is not None
        counted = as_weight(share.samples if weight is None else weight, mean)
        with watch.backward():
            (mean * counted.to(mean.dtype)).backward()
        total, weights = total + plain(mean) * counted.cpu(), weights + counted.cpu()
        if len(batches) > 1:
            sums.append(
                {clean(n): print_of(p.grad.double()) for n, p in model.named_parameters() if p.grad is not None}
            )
    for p in model.parameters():
        if p.grad is not None:
            p.grad /= float(weights)
    step.loss = float(total / weights)
    for number, after in enumerate(sums):
        before = sums[number - 1] if number else {}
        step.parts.append({n: (t - before[n] if n in before else t) / float(weights) for n, t in after.items()})


def _evaluate(job: Job, model: nn.Module, watch: Watch, side: Side, ask: Ask, device: str) -> None:
    if job.test is None:
        return
    count, read = opened(job, job.test(), "test set")
    order = torch.arange(test_samples(count, job.batch_size))
    model.eval()
    metrics = job.metrics or (lambda model, batch: {"loss": job.loss(model, batch)})
    parts = [BatchSlice(part, len(part), len(order)) for part in order.split(job.batch_size)]
    measure = watch.measured(metrics, [Rows(0, len(part.indices), len(part.indices), part.samples) for part in parts])
    sums: dict[str, tuple[Tensor, Tensor]] = {}
    zero = torch.zeros((), dtype=torch.float64)
    epoch = Cut(0, 0, len(order))
    for batch, share in _batches(read, parts, epoch, device):
        side.evaluated += share.indices.tolist()
        for name, (mean, weight) in _measured(measure, model, batch, share, ask, job.name).items():
            total, weights = sums.get(name, (zero, zero))
            sums[name] = (total + mean * weight, weights + weight)
    side.evaluation = {name: float(total / weights) for name, (total, weights) in sums.items()}
    side.sums = {name: (float(total), float(weights)) for name, (total, weights) in sums.items()}
    ends = sorted({int(part.indices[at]) for part in parts for at in (0, -1)})
    alone = [BatchSlice(torch.tensor([index]), 1, len(order)) for index in ends]
    measure = watch.lifted(metrics)
    for index, (batch, share) in zip(ends, _batches(read, alone, epoch, device), strict=True):
        for name, (mean, weight) in _measured(measure, model, batch, share, ask, job.name).items():
            side.alone.setdefault(name, {})[index] = (float(mean), float(weight))


def _measured(
    measure: Any, model: nn.Module, batch: Any, share: BatchSlice, ask: Ask, job: str
) -> dict[str, tuple[Tensor, Tensor]]:
    """Metrics of a batch, each a mean and what it is over."""
    found = {}
    with torch.no_grad(), computing(str(next(model.parameters()).device), ask.dtypes):
        named = measure(model, cast_batch(batch, ask.dtypes))
    for name, result in named.items():
        mean, weight = split_weight(result, share.samples, f"metric '{name}' of job '{job}'")
        found[name] = (plain(mean), as_weight(share.samples if weight is None else weight, mean).cpu())
    return found
