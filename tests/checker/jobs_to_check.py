"""Small jobs that a check is tried on: quick in float64, one for each thing that can go wrong."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import cloudpickle
import torch
import torch.nn.functional as F
from pytest import MonkeyPatch
from torch import Tensor, nn, optim
from torch.utils.checkpoint import checkpoint
from torch.utils.data import Subset

from meshwise.checker.one_device import one_device
from meshwise.checker.programs import watch_job
from meshwise.checker.proof import Proof, prove
from meshwise.checker.trace import CheckSpec, Trace
from meshwise.spec.plan import Plan
from meshwise.training.job.job import Job
from meshwise.training.jobs.registry import find_job
from tests.checker import seams
from tests.checker.models_to_check import MODELS, the_job

SIZES = {"mnist-mlp": 12, "mnist-cnn": 10, "mlp": 8, "gpt": 4}


def built_in(name: str, seed: int = 0) -> Job:
    """A built-in job with a small batch and little data."""
    job = find_job(name, seed=seed)
    small = replace(job, batch_size=SIZES[name])
    if name == "gpt":
        train, held_out = Short(job.data()), Short(job.test() if job.test else None)
        return replace(small, data=lambda: train, test=lambda: held_out)
    if name == "mlp":
        small = replace(small, model=narrow)
    data, test = job.data(), job.test() if job.test else None

    def part(whole: Any, count: int) -> Any:
        return tuple(t[:count] for t in whole) if isinstance(whole, tuple) else Subset(whole, range(count))

    return replace(small, data=lambda: part(data, 40), test=lambda: part(test, 40))


class Short:
    """The shortest documents of a set, which are still of unequal lengths."""

    def __init__(self, documents: Any) -> None:
        self._documents = documents
        self._order = documents.lengths.argsort(stable=True)[:40]

    def __len__(self) -> int:
        return len(self._order)

    def batch(self, indices: Tensor) -> Any:
        return self._documents.batch(self._order[indices])


def narrow() -> nn.Module:
    """The built-in mlp with fewer features between its layers."""
    return nn.Sequential(nn.Linear(1000, 66), nn.ReLU(), nn.Linear(66, 66), nn.ReLU(), nn.Linear(66, 10))


def rows(count: int, seed: int = 7) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, 6, generator=generator), torch.randint(3, (count,), generator=generator)


def classified(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def job_of(model: Callable[[], nn.Module], seed: int = 0, **more: Any) -> Job:
    settings: dict[str, Any] = {
        "loss": classified,
        "optimizer": lambda parameters: optim.AdamW(parameters, lr=0.01),
        "data": lambda: rows(30),
        "test": lambda: rows(17, 8),
        "batch_size": 8,
        "seed": seed,
    }
    return Job("small", model, **{**settings, **more})


def layers() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3))


def ticking(optimizer: Any) -> Any:
    return optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)


def plain(seed: int = 0) -> Job:
    """Linear layers, clipped, with a scheduler that ticks each step."""
    return job_of(layers, seed, clip_norm=0.1, scheduler=ticking)


class Dropped(nn.Module):
    """Dropout of every kind: a layer, in attention, between the layers of an LSTM, and noise that is added."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.drop = nn.Linear(6, 5 * 8), nn.Dropout(0.3)
        self.attend = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.2, batch_first=True)
        self.read = nn.LSTM(8, 8, 2, dropout=0.2, batch_first=True)
        self.out = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.drop(self.into(x)).unflatten(1, (5, 8))
        if self.training:
            x = x + 0.1 * torch.randn_like(x) + 0.1 * torch.rand(5, 8, dtype=x.dtype)
        x, _ = self.read(self.attend(x))
        return self.out(F.dropout(x[:, -1].float(), 0.1, self.training))


def dropped(seed: int = 0) -> Job:
    return job_of(Dropped, seed, epochs=2)


class Recomputed(nn.Module):
    """A block with dropout and a cast that runs again in the backward."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.block = nn.Linear(6, 8), nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.3), nn.Tanh())
        self.out = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        def cast(x: Tensor) -> Tensor:
            return self.block(x).float().sin().to(x.dtype)

        return self.out(checkpoint(cast, checkpoint(cast, self.into(x), use_reentrant=False), use_reentrant=False))


def recomputed(seed: int = 0) -> Job:
    return job_of(Recomputed, seed)


class Tied(nn.Module):
    """Two towers whose embeddings are one weight, and a head that shares another."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(6, 6, bias=False), nn.Linear(6, 6, bias=False)
        self.right.weight = self.left.weight
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.left(x)) * torch.sigmoid(self.right(x)))


def tied(seed: int = 0) -> Job:
    return job_of(Tied, seed)


class Counting(nn.Module):
    """A buffer that is a running mean of the steps, alike on every rank, and does nothing to the outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.net = layers()
        self.register_buffer("seen", torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            count_one(self.seen)
        return self.net(x)


def count_one(buffer: Any) -> None:
    buffer += 1


def counting(seed: int = 0) -> Job:
    return job_of(Counting, seed)


def normed(seed: int = 0) -> Job:
    return job_of(lambda: nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)), seed)


def weighed(seed: int = 0) -> Job:
    """A mean over what does not belong to class 0: each rank's mean is over another number."""

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        inputs, labels = batch
        counted = labels != 0
        each = F.cross_entropy(model(inputs), labels, reduction="none")
        return (each * counted).sum() / counted.sum().clamp(min=1), counted.sum()

    return job_of(layers, seed, loss=loss)


class Sorted(nn.Module):
    """Runs a module on as many rows as there are samples, which are not the samples, and makes nothing of it."""

    def __init__(self) -> None:
        super().__init__()
        self.look, self.net = nn.Tanh(), layers()

    def forward(self, x: Tensor) -> Tensor:
        self.look(x.sort(0)[0])
        result: Tensor = self.net(x)
        return result


class Spectral(nn.Module):
    """Complex numbers: parameters, a buffer, a cast and a Fourier transform; its loss needs their imaginary parts."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 8, dtype=torch.complex64) * 0.4)
        self.register_buffer("turn", torch.polar(torch.ones(8), torch.linspace(0, 3, 8)))
        self.out = nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        z = torch.fft.fft(x.to(self.weight.real.dtype)).to(self.weight.dtype) @ self.weight * self.turn
        made: Tensor = self.out(torch.cat([z.real, z.imag], 1).tanh())
        return made


def complex_numbers(seed: int = 0) -> Job:
    """A model of complex numbers."""
    return job_of(Spectral, seed, clip_norm=1.0)


class Biased(nn.Module):
    """A key bias: its gradient is zero, and rounding is all that there is of it."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.MultiheadAttention(6, 2, batch_first=True)
        self.out = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.stack([x, x.flip(1), x * x], 1)
        return self.out(self.mix(x, x, x, need_weights=False)[0].mean(1))


def biased(seed: int = 0) -> Job:
    return job_of(Biased, seed, optimizer=lambda parameters: optim.Adam(parameters, lr=0.01, eps=1e-16))


class Sampling(nn.Module):
    """Draws in the evaluation too, as Monte Carlo dropout does."""

    def __init__(self) -> None:
        super().__init__()
        self.net = layers()

    def forward(self, x: Tensor) -> Tensor:
        return self.net(F.dropout(x, 0.2, training=True))


def sampling(seed: int = 0) -> Job:
    return job_of(Sampling, seed)


def by_closure(seed: int = 0) -> Job:
    return job_of(layers, seed, clip_norm=0.1, optimizer=lambda ps: optim.LBFGS(list(ps), lr=0.5, max_iter=3))


OWN: dict[str, Callable[..., Job]] = {
    "plain": plain,
    "dropped": dropped,
    "recomputed": recomputed,
    "tied": tied,
    "counting": counting,
    "normed": normed,
    "complex": complex_numbers,
    "sorted": lambda seed=0: job_of(Sorted, seed),
    "weighed": weighed,
    "biased": biased,
    "sampling": sampling,
    "by closure": by_closure,
}


def job_named(name: str, seed: int = 0) -> Job:
    """A job of `OWN`, of `MODELS`, or a built-in one."""
    if name in MODELS:
        return the_job(name, seed)
    return OWN[name](seed) if name in OWN else built_in(name, seed)


_references: dict[Any, Trace] = {}


def reference(name: str, seed: int, spec: CheckSpec) -> Trace:
    """One device, once for all plans that cut a step alike on as many devices."""
    plain = Plan(data=spec.plan.devices, accumulate=spec.plan.accumulate)
    key = (
        name,
        seed,
        replace(
            spec, perturb=False, plan=plain if spec.in_float64 else replace(spec.plan, data=spec.plan.devices, shard=1)
        ),
    )
    if key not in _references:
        for other in [other for other in _references if other[:2] != key[:2]]:
            del _references[other]
        _references[key] = one_device(job_named(name, seed), spec)
    return _references[key]


def followed(name: str, seed: int, spec: CheckSpec, draws: Any, plant: Callable[[Any], Any] | None) -> Trace | None:
    """The plan's side, in a worker; `plant` patches our own code in it for as long as it runs."""
    with MonkeyPatch.context() as patch:
        if plant is not None:
            plant(patch)
        found = watch_job(job_named(name, seed), spec, draws)
    return None if found is None else found.trace


def checked(
    pool: Any,
    name: str,
    plan: Plan,
    *,
    seed: int = 0,
    steps: int = 3,
    plant: Callable[[Any], Any] | None = None,
    rounding: bool = False,
    perturb: bool = False,
) -> Proof:
    """Check a job in a pool of workers. rounding: in the plan's own precision as well."""
    if plant is not None:
        for module in (sys.modules[plant.__module__], seams):  # workers cannot import the tests' modules
            cloudpickle.register_pickle_by_value(module)
    specs = [CheckSpec(plan, steps, perturb=perturb)]
    specs += [replace(specs[0], in_float64=False)] if rounding else []
    sides = []
    for spec in specs:
        one = reference(name, seed, spec)
        sides.append((one, pool(plan.devices).run(followed, name, seed, spec, one.draws, plant)[0]))
    rounded = sides[1] if rounding else ()
    return prove(
        name,
        specs[0],
        f"{plan.devices}xcpu",
        *sides[0],
        rounded,
        lambda again: one_device(job_named(name, seed), again),
    )
