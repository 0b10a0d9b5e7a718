"""What ranks decide apart is noticed with the next loss: settings of optimizers, and schedulers fed a local number."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR, ReduceLROnPlateau
from torch.utils.data import DataLoader, TensorDataset

import meshwise as mw
from meshwise.spec.errors import UsageError
from meshwise.training.guards.agreed import settings_of
from meshwise.training.guards.replicas import settings_differ
from meshwise.transfer import collectives

F = nn.functional


def batches() -> DataLoader[Any]:
    x = torch.randn(12, 3, generator=torch.Generator().manual_seed(1))
    return DataLoader(TensorDataset(x, x.argmax(1)), batch_size=4)


def train(change: Any, plan: mw.Plan | None = None, *, weighed: bool = False, given: bool = True) -> str:
    """Two epochs, with `change(optimizer, number of the step, this rank's own loss)` after each step."""
    model: nn.Module = nn.Linear(3, 3)
    model, loader = mw.distribute(model, batches(), plan=plan, view="rank")
    optimizer = torch.optim.AdamW(model.parameters(), 0.1)
    if given:
        mw.distribute(optimizer, view="rank")
    steps = 0
    try:
        for x, y in (pair for _ in range(2) for pair in loader):
            loss = F.cross_entropy(model(x), y)
            mw.backward(loss, weight=len(x) if weighed else None)
            optimizer.step()
            optimizer.zero_grad()
            steps += 1
            change(optimizer, steps, loss.item())
    except UsageError as error:
        return f"{steps}: {error}"
    return "alike"


def by_rank(setting: str, value: Any) -> Any:
    def change(optimizer: Any, steps: int, loss: float) -> None:
        if steps == 3 and mw.rank() == 1:
            optimizer.param_groups[0][setting] = value

    return change


@pytest.mark.parametrize("plan", [mw.Plan(data=2), mw.Plan(shard=2), mw.Plan(data=2, zero1=True)], ids=str)
@pytest.mark.parametrize("weighed", [False, True])
def test_another_learning_rate_on_a_rank_stops_all_at_the_next_backward(
    plan: mw.Plan, weighed: bool, pool: Any
) -> None:
    change = by_rank("lr", 3e-4)
    for said in pool(2).run(lambda: train(change, plan, weighed=weighed)):
        assert said.startswith("3: rank 1 has lr 0.0003, rank 0 0.1 (group 0 of AdamW)"), said


@pytest.mark.parametrize(
    ("setting", "value", "shown"),
    [("weight_decay", 0.5, "weight decay 0.5, rank 0 0.01"), ("betas", (0.5, 0.9), "betas (0.5, 0.9), rank 0 (0.9")],
)
def test_other_settings_and_an_optimizer_that_was_not_given_are_noticed(
    setting: str, value: Any, shown: str, pool: Any
) -> None:
    change = by_rank(setting, value)
    for said in pool(3).run(lambda: train(change, given=False)):
        assert said.startswith("3: rank 1 has ") and shown in said


def test_a_scheduler_fed_with_a_local_loss_is_told_so_once_it_sets_another_rate(pool: Any) -> None:
    def case() -> str:
        made: list[Any] = []

        def change(optimizer: Any, steps: int, loss: float) -> None:
            if not made:
                made.append(mw.distribute(ReduceLROnPlateau(optimizer, factor=0.5, patience=0), view="rank"))
            made[0].step(steps * (2 * mw.rank() - 1))

        return train(change)

    for said in pool(2).run(case):
        assert said.startswith("2: rank 1 has lr 0.05, rank 0 0.1") and "scheduler.step(mw.mean(loss))" in said


def test_schedulers_that_all_ranks_feed_alike_are_alike(pool: Any) -> None:
    def case(kind: str) -> str:
        made: list[Any] = []

        def change(optimizer: Any, steps: int, loss: float) -> None:
            if not made:
                scheduler = (
                    LambdaLR(optimizer, lambda step: 0.9**step)
                    if kind == "lambda"
                    else ReduceLROnPlateau(optimizer, patience=0)
                )
                made.append(mw.distribute(scheduler, view="rank"))
            made[0].step(*([] if kind == "lambda" else [mw.mean(loss)]))

        return train(change)

    for kind in ("lambda", "plateau"):
        assert pool(2).run(case, kind) == ["alike"] * 2


def test_nothing_more_is_sent_and_no_collective_more(pool: Any) -> None:
    """A steady step: the bucket of the gradients, in which the loss and the signs travel."""

    def case() -> Any:
        sent: list[int] = []
        real = collectives._begin_sum
        collectives._begin_sum = lambda tensor, *more, **options: (
            sent.append(tensor.numel()) or real(tensor, *more, **options)
        )  # type: ignore
        try:
            train(lambda *_: None)
        finally:
            collectives._begin_sum = real
        return sent[-1], len(sent)

    for last, _ in pool(2).run(case):
        assert last == 3 * 3 + 3 + 33


def test_settings_of_groups_are_told_by_their_name() -> None:
    p, q = (nn.Parameter(torch.zeros(1)) for _ in range(2))

    def made(rate: float) -> Any:
        held = [torch.optim.SGD([p], 0.1, momentum=0.9), torch.optim.Adam([q], torch.tensor(rate))]
        return settings_of([weakref.ref(optimizer) for optimizer in held])

    assert settings_differ([made(0.1), made(0.1)]) == ""
    assert settings_differ([made(0.5), made(0.5), made(0.25)]).startswith(
        "rank 2 has lr 0.25, rank 0 0.5 (group 0 of Adam)"
    )
