"""Makes mistakes in a step, between steps, and in a validation: with verbs of the other view, or half of them."""

from __future__ import annotations

import copy
import itertools
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

import meshwise as mw
from tests.training.whole.mistakes import MADE, ce, parts, placed, rows, several, train
from tests.training.whole.shared import Distribute, step, weights


def stepping(verdict: str, name: str, one: Callable[[nn.Module, Any, Tensor, int], Any], size: int = 8) -> None:
    """A mistake between the loss and the next batch."""

    def program(distribute: Distribute) -> Any:
        model, optimizer, loader = distribute(*parts(size))
        ema, left = copy.deepcopy(model), []
        for number, (x, y) in enumerate(itertools.chain(loader, loader)):
            model.ema = [ema]
            left.append(one(model, optimizer, ce(model, x, y), number))
        return left, weights(model)

    MADE[name] = verdict, program


def by_verb(model: Any, optimizer: Any, loss: Tensor, number: int) -> Any:
    optimizer.zero_grad()
    found = mw.backward(loss)
    optimizer.step()
    return found.item() + loss.item()


def accumulated(model: Any, optimizer: Any, loss: Tensor, number: int) -> Any:
    (loss / 2).backward()
    if number % 2:
        optimizer.step()
        optimizer.zero_grad()
    return loss.item()


def scaled(model: Any, optimizer: Any, loss: Tensor, number: int) -> Any:
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    scaler.step(optimizer)
    return norm.item()


def written(model: Any, optimizer: Any, loss: Tensor, number: int) -> Any:
    found = step(loss, optimizer)
    with torch.no_grad():
        model[0].weight.clamp_(-0.3, 0.3)
        model[2].bias[0] = 0
    return found


def averaged(model: Any, optimizer: Any, loss: Tensor, number: int) -> Any:
    step(loss, optimizer)
    with torch.no_grad():
        for mean, p in zip(model.ema[0].parameters(), model.parameters(), strict=True):
            mean.lerp_(p, 0.1)
    return weights(model.ema[0])


def by_main(model: Any, optimizer: Any, loss: Tensor, number: int) -> Any:
    optimizer.zero_grad()
    loss.backward()
    if mw.is_main():
        optimizer.step()
    return loss.item()


def printed_by_main(model: Any, optimizer: Any, loss: Tensor, number: int) -> Any:
    found = step(loss, optimizer)
    if mw.is_main():
        assert loss.item() == found
    return found


def late(model: Any, optimizer: Any, loss: Tensor, number: int) -> Any:
    time.sleep(0.5 * (number == 1 and mw.rank() == 1))
    return step(loss, optimizer)


def joined(model: Any, optimizer: Any, loss: Tensor, number: int) -> Any:
    found = torch.tensor(step(loss, optimizer))
    if several():
        dist.all_reduce(found)
    return found.item()


def joined_loss(model: Any, optimizer: Any, loss: Tensor, number: int) -> Any:
    step(loss, optimizer)
    if several():
        dist.all_reduce(loss)
    return loss.item()


def joined_gradients(model: Any, optimizer: Any, loss: Tensor, number: int) -> Any:
    optimizer.zero_grad()
    loss.backward()
    for p in model.parameters():
        if several():
            dist.all_reduce(p.grad)
    optimizer.step()
    return loss.item()


stepping("right", "backward_left", lambda model, optimizer, loss, number: step(loss, optimizer))
stepping("right", "backward_by_verb", by_verb)
stepping("right", "accumulation_without_the_verb", accumulated, 4)
stepping("right", "scaled_and_clipped", scaled)
stepping("right", "weights_written", written)
stepping("right", "mean_of_weights", averaged)
stepping("refused", "step_of_rank_0_alone", by_main)
stepping("right", "printed_on_rank_0", printed_by_main)
stepping("right", "late_rank", late)
stepping("said", "number_reduced_by_hand", joined)
stepping("refused", "loss_reduced_by_hand", joined_loss)
stepping("said", "gradients_reduced_by_hand", joined_gradients)


def totals_of_parts(distribute: Distribute, *things: Any) -> Any:
    model, optimizer, loader = distribute(*things)
    total = right_ones = seen = 0
    for x, y in loader:
        out = model(x)
        total += step(F.cross_entropy(out, y), optimizer) * len(y)
        right_ones, seen = right_ones + (out.argmax(1) == y).sum().item(), seen + len(x)
    return total / seen, total / len(loader.dataset), right_ones / seen


def plateau(distribute: Distribute, *things: Any) -> Any:
    model, optimizer, loader = distribute(*things)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
    for _ in range(3):
        scheduler.step(sum(train(model, optimizer, loader)[0]))
    return optimizer.param_groups[0]["lr"], weights(model)


def left_by_the_loss(distribute: Distribute, *things: Any) -> Any:
    model, optimizer, loader = distribute(*things)
    for _ in range(3):
        next(True for x, y in loader if step(ce(model, x, y), optimizer) < 1.2)
    return weights(model)


def zipped_and_cycled(distribute: Distribute, *things: Any) -> Any:
    model, optimizer, loader, others = distribute(*things, DataLoader(rows(30), 6, shuffle=True))
    pairs = zip(itertools.cycle(loader), others, strict=False)
    return [step(ce(model, *one) + ce(model, *other), optimizer) for one, other in pairs], weights(model)


def asked_by_next(distribute: Distribute, *things: Any) -> Any:
    model, optimizer, loader = distribute(*things)
    batches = iter(loader)
    return [step(ce(model, *next(batches)), optimizer) for _ in range(len(loader))], weights(model)


def lbfgs(distribute: Distribute, *things: Any) -> Any:
    model, _, loader = things
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=3)
    model, optimizer, loader = distribute(model, optimizer, loader)

    def closure(batch: Any) -> Tensor:
        optimizer.zero_grad()
        loss = ce(model, *batch)
        loss.backward()
        return loss

    return [float(optimizer.step(partial(closure, batch))) for batch in loader], weights(model)


for each in (totals_of_parts, plateau, left_by_the_loss, zipped_and_cycled, asked_by_next, lbfgs):
    placed("right", each.__name__, each)


def of_validation(verdict: str, name: str, measured: Callable[[nn.Module, Any], Any]) -> None:
    """A mistake in a loop without training."""

    def program(distribute: Distribute, *things: Any) -> Any:
        model, optimizer, loader, others = distribute(*things, DataLoader(rows(20), 6))
        train(model, optimizer, loader)
        with torch.no_grad():
            return measured(model, others)

    placed(verdict, name, program)


def hits(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return (model(x).argmax(1) == y).sum()


def lists(model: nn.Module, loader: Any) -> Any:
    found = [(int(mw.sum(hits(model, x, y))), model(x).argmax(1).tolist(), y.numpy().tolist()) for x, y in loader]
    return found, float(np.mean([ce(model, x, y) for x, y in loader]))


def gathered(model: nn.Module, loader: Any) -> Any:
    found = []
    for x, _ in loader:
        own = model(x).argmax(1)
        every = [torch.zeros_like(own) for _ in range(2)]
        if several():
            dist.all_gather(every, own)
        found.append(own.tolist())
    return found


def of_main(model: nn.Module, loader: Any) -> Any:
    counts = [hits(model, x, y).item() for x, y in loader]
    return sum(counts) + 0 * sum(mw.sum(count) for count in counts if mw.is_main())


def share(one: Callable[[Any], Any], size: Callable[[Any], Any]) -> Callable[[nn.Module, Any], Any]:
    """The accuracy, where each batch's hits are passed through `one`, and its rows are counted by `size`."""
    return lambda model, loader: float(sum(one(hits(model, *b)) for b in loader) / sum(size(b[0]) for b in loader))


def of_each(one: Callable[[nn.Module, Tensor, Tensor], Any]) -> Callable[[nn.Module, Any], Any]:
    return lambda model, loader: [one(model, *batch) for batch in loader]


def afterwards(model: nn.Module, loader: Any) -> Any:
    return mw.sum(sum(hits(model, x, y).item() for x, y in loader))


of_validation("right", "nothing_summed", share(lambda n: n, len))
of_validation("right", "hits_summed_and_sizes_not", share(mw.sum, len))
of_validation("right", "sizes_summed_too", share(mw.sum, lambda x: mw.sum(len(x))))
of_validation("right", "summed_over_own_size", of_each(lambda model, x, y: mw.sum(hits(model, x, y).item()) / len(y)))
of_validation("right", "summed_after_the_loop", afterwards)
of_validation("right", "lists_beside_a_sum", lists)
of_validation("right", "means", of_each(lambda model, x, y: float(mw.mean(ce(model, x, y), len(x)))))
of_validation("right", "gathered_by_verb", of_each(lambda model, x, y: mw.gather_samples(model(x)).tolist()))
of_validation("refused", "gathered_by_hand", gathered)
of_validation("right", "sum_on_rank_0", of_main)
