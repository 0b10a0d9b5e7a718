"""A flipped bit on one replica is noticed, whichever bit it is, and the minority is named."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import nn

from meshwise.spec.errors import ReplicaError
from meshwise.spec.plan import Plan
from meshwise.training.job.replica_check import ReplicaCheck, minority
from meshwise.training.recovery.state import RunState
from meshwise.transfer import collectives
from meshwise.workers.failure import by_error, culprit


@pytest.fixture
def state() -> RunState:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.randn(5, 4)).sum().backward()
    optimizer.step()
    return RunState(model, optimizer, None, torch.amp.GradScaler("cpu", enabled=False), 0, step=7)


def as_ranks(monkeypatch: pytest.MonkeyPatch, others: Sequence[dict[str, int] | None]) -> list[dict[str, int]]:
    """The other ranks hold what is given, None stands for what rank 0 holds. Returns what rank 0 told."""
    told: list[dict[str, int]] = []

    def gather(mine: dict[str, int], group: Any) -> list[dict[str, int]]:
        told.append(dict(mine))
        return [mine, *(mine | (other or {}) for other in others)]

    monkeypatch.setattr(collectives, "gather_objects", gather)
    return told


@pytest.mark.parametrize(
    ("values", "found"),
    [([1, 1, 1], []), ([1, 2, 1], [1]), ([1, 2], [0, 1]), ([1, 1, 2, 2], [0, 1, 2, 3]), ([3, 1, 1, 2, 1], [0, 3])],
)
def test_the_minority_is_told_where_there_is_a_majority(values: list[int], found: list[int]) -> None:
    assert minority(values) == found


@pytest.mark.parametrize("bit", range(32))
def test_every_bit_of_a_parameter_counts(bit: int, state: RunState, monkeypatch: pytest.MonkeyPatch) -> None:
    told, check = as_ranks(monkeypatch, [None]), ReplicaCheck(Plan(data=2))
    check.compare(state)
    weight = next(state.model.parameters())
    weight.data.view(torch.int32)[1, 2] ^= torch.tensor(1).bitwise_left_shift(bit).to(torch.int32)
    state.step += 1
    check.compare(state)
    before, after = told
    assert [name for name in before if before[name] != after[name]] == ["parameter 0.weight"]


@pytest.mark.parametrize("name", ["parameter 0.bias", "exp_avg_sq of 0.weight"])
def test_what_one_replica_alone_holds_is_named(name: str, state: RunState, monkeypatch: pytest.MonkeyPatch) -> None:
    told, check = as_ranks(monkeypatch, [None, None]), ReplicaCheck(Plan(data=3))
    check.compare(state)
    assert name in told[0]
    as_ranks(monkeypatch, [{name: 1}, None])
    check.compare(state)  # of the same step: once
    state.step = 10
    with pytest.raises(ReplicaError, match=rf"step 10: replicas differ in {name}, on rank 1: a bit") as error:
        check.compare(state)
    failures = [by_error(rank, error.value) for rank in range(3)]
    assert culprit(failures).rank == 1 and culprit(failures).of_machine


def test_two_replicas_cannot_tell_which_is_right(state: RunState, monkeypatch: pytest.MonkeyPatch) -> None:
    as_ranks(monkeypatch, [{"parameter 0.bias": 1}])
    with pytest.raises(ReplicaError, match=r"replicas differ in parameter 0.bias, on ranks 0, 1: a bit"):
        ReplicaCheck(Plan(data=2)).compare(state)


def test_parts_are_compared_with_the_same_part_of_other_replicas(
    state: RunState, monkeypatch: pytest.MonkeyPatch
) -> None:
    as_ranks(monkeypatch, [{"parameter 0.bias": 1}, None, {"parameter 0.bias": 1}])
    ReplicaCheck(Plan(data=2, shard=2)).compare(state)
    as_ranks(monkeypatch, [{"parameter 0.bias": 1}, None, {"parameter 0.bias": 2}])
    with pytest.raises(ReplicaError) as error:
        ReplicaCheck(Plan(data=2, shard=2)).compare(state)
    assert error.value.ranks == (1, 3)


def test_without_replicas_nothing_is_compared(state: RunState) -> None:
    check = ReplicaCheck(Plan(shard=2))
    assert not any(step % check.every == 0 for step in range(1, 1001))
    check.compare(state)
