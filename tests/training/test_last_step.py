"""The state after the last step, and the losses that no rank has written yet: for when a peer is gone.

Of training/loss_ledger.py too.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from meshwise.recovery.state import RunState
from meshwise.spec.plan import Plan
from meshwise.spec.world import World
from meshwise.training.last_step import LastStep, can_rescue
from meshwise.training.loss_ledger import ROWS, LossLedger, ledger_path, noted
from meshwise.training.weighing import Losses


def a_state() -> RunState:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    return RunState(model, optimizer, None, torch.amp.GradScaler("cpu", enabled=False), seed=0, step=5, index=40)


def test_a_forward_in_flight_is_taken_back() -> None:
    state = a_state()
    before = {name: tensor.clone() for name, tensor in state.model.state_dict().items()}
    last = LastStep(state)
    last.keep()
    state.model(torch.randn(8, 3)).sum().backward()
    assert not torch.equal(state.model[1].running_mean, before["1.running_mean"])  # type: ignore[index]
    assert last.go_back()
    assert all(torch.equal(tensor, before[name]) for name, tensor in state.model.state_dict().items())
    state.epoch, state.index = 1, 0  # the epoch has ended, and what follows an epoch has not been done
    assert last.go_back() and (state.epoch, state.index, state.step) == (0, 40, 5)


def test_a_step_that_has_changed_parameters_is_not_taken_back() -> None:
    state = a_state()
    last = LastStep(state)
    assert not last.go_back()  # nothing was kept yet
    last.keep()
    state.model(torch.randn(8, 3)).sum().backward()
    state.optimizer.step()
    assert not last.go_back()
    last.keep()
    state.step += 1
    assert not last.go_back()


@pytest.mark.parametrize(
    ("plan", "world", "can"),
    [
        (Plan(data=2), World(size=2, local_size=2), True),
        (Plan(data=2, accumulate=4), World(size=2, local_size=2), True),
        (Plan(), World(), False),
        (Plan(data=2), World(size=2), False),  # on two machines
        (Plan(data=2), World(size=2, local_size=2, device="cuda:0"), False),
        (Plan(data=2, zero1=True), World(size=2, local_size=2), False),
        (Plan(shard=2), World(size=2, local_size=2), False),
        (Plan(data=2, shard=2), World(size=4, local_size=4), False),
        (Plan(data=2, tensor=2), World(size=4, local_size=4), False),
    ],
)
def test_only_replicas_hold_all_of_the_state(plan: Plan, world: World, can: bool) -> None:
    assert can_rescue(plan, world) is can


def losses(value: float) -> Losses:
    return [(torch.tensor(value), 4.0), (torch.tensor(2 * value), 2.0)]


def test_losses_of_a_rank_that_is_gone_are_known(tmp_path: Path) -> None:
    ledgers = [LossLedger(tmp_path, rank) for rank in range(2)]
    for step in (3, 4, 5):
        for rank, ledger in enumerate(ledgers):
            ledger.note(1, step, losses(step + rank / 8))
    ledgers[0].note(1, 6, losses(6.0))  # the other was killed before
    again = LossLedger(tmp_path, 0)  # the next attempt
    found = list(noted(tmp_path, 2, 4, 6))
    assert [(epoch, step) for epoch, step, _ in found] == [(1, 4), (1, 5)]
    assert found[0][2].tolist() == [[4 * 4 + 8 * 2, 6], [4.125 * 4 + 8.25 * 2, 6]]
    again.note(2, 4 + ROWS, losses(1.0))
    assert [step for _, step, _ in noted(tmp_path, 2, 4, 6)] == [5]


def test_without_a_whole_ledger_of_each_rank_nothing_is_known(tmp_path: Path) -> None:
    LossLedger(tmp_path, 0).note(0, 1, losses(1.0))
    assert list(noted(tmp_path, 2, 1, 1)) == []
    ledger_path(tmp_path, 1).write_bytes(b"half")
    assert list(noted(tmp_path, 2, 1, 1)) == []
