"""Makes the mistakes of newcomers, each in a small training program, with what must come of it.

`right` leaves what plain Python leaves, `refused` raises an error of ours, `said` prints a sentence, and `alone` raises
what it raises on one device too.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset, Subset, WeightedRandomSampler

import meshwise as mw
from tests.training.whole.shared import Distribute, mlp, rows, step, weights

Loss = Callable[[nn.Module, Tensor, Tensor], Tensor]
MADE: dict[str, tuple[str, Callable[[Distribute], Any]]] = {}
"""The verdict on each mistake, and the mistake."""


ce: Loss = lambda model, x, y: F.cross_entropy(model(x), y)  # noqa: E731


def parts(size: int = 8, data: Any = None, rate: float = 0.1, **options: Any) -> Any:
    model = mlp()
    options = {"shuffle": "sampler" not in options} | options
    return model, torch.optim.SGD(model.parameters(), rate, momentum=0.5), DataLoader(data or rows(), size, **options)


def train(model: nn.Module, optimizer: Any, loader: Any, loss: Loss = ce) -> Any:
    return [step(loss(model, x, y), optimizer) for _ in range(2) for x, y in loader], weights(model)


def of_loss(verdict: str, name: str, loss: Loss) -> None:
    """A mistake that is a loss."""
    MADE[name] = verdict, lambda distribute: train(*distribute(*parts()), loss)


def of_parts(verdict: str, name: str, made: Callable[[], Any]) -> None:
    """A mistake in what is distributed."""
    MADE[name] = verdict, lambda distribute: train(*distribute(*made()))


def placed(verdict: str, name: str, program: Callable[..., Any]) -> None:
    """A mistake in which `program` gets `distribute`, a model, an optimizer and a loader, none of them distributed."""
    MADE[name] = verdict, lambda distribute: program(distribute, *parts())


def several() -> bool:
    return mw.world_size() > 1


class Stream(IterableDataset[Any]):
    def __init__(self, by_rank: bool) -> None:
        self.by_rank = by_rank

    def __iter__(self) -> Iterator[Any]:
        begin, every = (mw.rank(), mw.world_size()) if self.by_rank else (0, 1)
        return itertools.islice(iter(rows(24)), begin, None, every)


class Noisy(Dataset[Any]):
    def __init__(self, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)

    def __len__(self) -> int:
        return 21

    def __getitem__(self, at: int) -> Any:
        x, y = rows()[at]
        return x + torch.randn(6, generator=self.generator), y


# What is distributed, and where.


def head_replaced(d: Distribute, model: Any, *others: Any) -> Any:
    model, optimizer, loader = d(model, *others)
    first, model[2] = train(model, optimizer, loader), nn.Linear(8, 3)
    return first, train(model, torch.optim.SGD(model.parameters(), 0.1), loader)


def sgd(model: nn.Module) -> Any:
    return torch.optim.SGD(model.parameters(), 0.1)


placed("right", "model_not_passed", lambda d, model, *others: train(model, *d(*others)))
placed("right", "loader_not_passed", lambda d, model, optimizer, loader: train(*d(model, optimizer), loader))
placed("right", "not_rebound", lambda d, *things: (d(*things), train(*things))[1])
placed("right", "optimizer_not_passed", lambda d, m, optimizer, loader: train(d(m), optimizer, d(loader)))
placed("right", "optimizer_made_after", lambda d, m, _, loader: train(d(m), sgd(m), d(loader)))
placed("right", "another_order", lambda d, *things: train(*reversed(d(*reversed(things)))))
placed("right", "distributed_in_each_epoch", lambda d, *things: [train(*d(*things)) for _ in range(2)])
placed("right", "optimizer_in_each_epoch", lambda d, m, _, x: [train(d(m), sgd(m), data) for data in [d(x)] * 2])
placed("right", "head_is_replaced", head_replaced)
placed("alone", "unpacked_too_few", lambda d, *things: (lambda model, loader: 0)(*d(*things)))
placed("right", "seeded_by_rank_before", lambda d, *things: (torch.manual_seed(mw.rank()), train(*d(*things)))[1])


def ddp() -> Any:
    model, *others = parts()
    return (nn.parallel.DistributedDataParallel(model) if several() else model), *others


def of_another_model() -> Any:
    return mlp(), *parts()[1:]


of_parts("refused", "wrapped_in_ddp", ddp)
of_parts("refused", "wrapped_in_data_parallel", lambda: (nn.DataParallel(mlp()), *parts()[1:]))
of_parts("refused", "optimizer_of_another_model", of_another_model)
of_parts(
    "right",
    "distributed_sampler_left",
    lambda: parts(shuffle=False, sampler=DistributedSampler(rows(24), 1, 0), data=rows(24)),
)
of_parts("right", "drops_last", lambda: parts(drop_last=True))
of_parts("right", "batches_of_one", lambda: parts(1))
of_parts("right", "weighted_sampler", lambda: parts(sampler=WeightedRandomSampler([0.1] * 20 + [1], 21)))
of_parts("right", "workers", lambda: parts(num_workers=2, persistent_workers=True))
of_parts("right", "iterable", lambda: parts(data=Stream(False), shuffle=False))
of_parts("refused", "iterable_by_rank", lambda: parts(data=Stream(True), shuffle=False))
of_parts("refused", "subset_by_rank", lambda: parts(data=Subset(rows(), range(mw.rank(), 21, mw.world_size()))))
of_parts("right", "generator_of_the_data", lambda: parts(data=Noisy(0)))
of_parts("refused", "generator_of_the_data_by_rank", lambda: parts(data=Noisy(mw.rank())))
of_parts("said", "batch_divided_by_ranks", lambda: parts(8 // mw.world_size()))
of_parts("said", "rate_times_ranks", lambda: parts(rate=0.1 * mw.world_size()))


# Draws.


def seeded(name: str, seed: Callable[[int], Any], drawn: Callable[[Tensor], Any]) -> None:
    """Draws in the loop from a generator that is seeded by the rank."""

    def program(distribute: Distribute, *things: Any) -> Any:
        things = distribute(*things)
        seed(mw.rank())
        return train(*things, lambda model, x, y: ce(model, x + drawn(x), y))

    placed("refused", name, program)


OWN = torch.Generator()
seeded("numpy_seeded_by_rank", np.random.seed, lambda x: np.random.rand())
seeded("python_seeded_by_rank", random.seed, lambda x: random.random())
seeded("generator_seeded_by_rank", OWN.manual_seed, lambda x: torch.rand(x.shape, generator=OWN))
again = lambda d, *things: [(torch.manual_seed(5), train(*each))[1] for each in [d(*things)] * 2]  # noqa: E731
placed("right", "seeded_in_each_epoch", again)


def mixed_up(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    share, other = float(np.random.beta(0.4, 0.4)), torch.randperm(len(x))
    return share * ce(model, share * x + (1 - share) * x[other], y) + (1 - share) * ce(model, x, y[other])


# Losses.


def contrasted(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    z = F.normalize(model(x), dim=1)
    return F.cross_entropy(z @ z.T / 0.1, torch.arange(len(x)))


def rows_of_rank(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    own = slice(mw.rank(), None, mw.world_size())
    return ce(model, x[own], y[own])


def tokens_that_count(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    each = F.cross_entropy(model(x), y, reduction="none")
    return (each * (y > 0)).sum() / (y > 0).sum().clamp(min=1)


def weighed(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x), y, weight=torch.tensor([0.2, 1.0, 3.0], dtype=x.dtype))


def penalty(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return ce(model, x, y) + 0.01 * sum(p.square().sum() for p in model.parameters())


of_loss("alone", "model_module", lambda model, x, y: ce(model.module, x, y))
of_loss("alone", "raises_on_a_batch", lambda model, x, y: ce(model, x[:, 1:], y))
of_loss("right", "mixup", mixed_up)
of_loss("right", "noise_in_the_loop", lambda model, x, y: ce(model, x + 0.1 * torch.randn_like(x), y))
of_loss("right", "whitened", lambda model, x, y: ce(model, (x - x.mean(0)) / (x.std(0) + 1e-5), y))
of_loss("right", "sum_of_rows", lambda model, x, y: F.cross_entropy(model(x), y, reduction="sum") / 8)
of_loss("right", "class_weights", weighed)
of_loss("right", "mean_of_what_counts", tokens_that_count)
of_loss("right", "contrastive", contrasted)
of_loss("right", "penalty_of_weights", penalty)
of_loss("right", "batch_split_by_verb", lambda model, x, y: ce(model, *mw.split(x, y)))
of_loss("refused", "rows_chosen_by_rank", rows_of_rank)
of_loss("said", "loss_divided_by_ranks", lambda model, x, y: ce(model, x, y) / mw.world_size())
of_loss("refused", "loss_that_is_nan", lambda model, x, y: ce(model, x, y) * float("nan"))
