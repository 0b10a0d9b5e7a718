"""What torch has for averages and states of distributed models (`AveragedModel`, `torch.distributed.checkpoint`) works
after mw.distribute as on one device."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint import state_dict as torch_state
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import meshwise as mw
from meshwise.spec.plan import Plan
from meshwise.training.process.session import end_sessions
from tests.pool import CaseFailed


def net(norm: bool = False) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16) if norm else nn.Tanh(), nn.Linear(16, 1)).double()


def data() -> Any:
    x = torch.randn(64, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    return torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True)), batch_size=16)


def whole(state: Any) -> dict[str, torch.Tensor]:
    return {name: torch.tensor(value.tolist(), dtype=torch.float64) for name, value in state.items()}


def averaged(plan: Plan | None, ema: bool) -> dict[str, torch.Tensor]:
    end_sessions()
    model: Any = net(norm=True)
    average: Any = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9) if ema else None, use_buffers=True)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    model, average, optimizer, loader = mw.distribute(model, average, optimizer, data(), plan=plan, view="rank")
    for x, y in loader:
        mw.backward(nn.functional.mse_loss(model(x), y))
        optimizer.step()
        optimizer.zero_grad()
        average.update_parameters(model)
    found = whole(average.state_dict())
    end_sessions()
    return found


def assert_equal(found: dict[str, torch.Tensor], want: dict[str, torch.Tensor]) -> None:
    assert found.keys() == want.keys()
    for name, value in want.items():
        assert torch.allclose(found[name], value, rtol=0, atol=1e-12), name


@pytest.mark.parametrize("plan", [Plan(shard=2), Plan(data=2)], ids=repr)
@pytest.mark.parametrize("ema", [True, False])
def test_an_average_of_parameters_and_buffers_is_that_of_one_device(plan: Plan, ema: bool, pool: Any) -> None:
    want = averaged(None, ema)
    for found in pool(2).run(averaged, plan, ema):
        assert_equal(found, want)


def saved() -> Any:
    """The states of a model and its optimizer after an epoch of plain torch."""
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), 0.1)
    for x, y in data():
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.state_dict(), torch_state.get_optimizer_state_dict(model, optimizer)


def resumed(plan: Plan | None, state: Any, sent: bool = False) -> dict[str, torch.Tensor]:
    """The weights after another epoch. sent: rank 0 alone has the state, and sends it."""
    end_sessions()
    model: Any = net()
    optimizer = torch.optim.AdamW(model.parameters(), 0.1)
    model, optimizer, loader = mw.distribute(model, optimizer, data(), plan=plan, view="rank")
    options = None
    if plan is not None:
        options = torch_state.StateDictOptions(full_state_dict=True, broadcast_from_rank0=sent)
    own = ({}, {}) if sent and mw.rank() else copy.deepcopy(state)
    torch_state.set_model_state_dict(model, own[0], options=options)
    torch_state.set_optimizer_state_dict(model, optimizer, own[1], options=options)
    for x, y in loader:
        mw.backward(nn.functional.mse_loss(model(x), y))
        optimizer.step()
        optimizer.zero_grad()
    found = whole(model.state_dict())
    end_sessions()
    return found


@pytest.mark.parametrize("plan", [Plan(data=2), Plan(shard=2), Plan(data=2, zero1=True)], ids=repr)
@pytest.mark.parametrize("sent", [False, True])
def test_torchs_own_state_functions_load_what_one_device_saved(plan: Plan, sent: bool, pool: Any) -> None:
    state = saved()
    want = resumed(None, state)
    for found in pool(2).run(resumed, plan, state, sent):
        assert_equal(found, want)


def test_a_step_with_gradients_of_a_ranks_own_is_refused_all_the_same(pool: Any) -> None:
    def case() -> None:
        model: Any = net()
        optimizer = torch.optim.AdamW(model.parameters(), 0.1)
        model, optimizer, loader = mw.distribute(model, optimizer, data(), view="rank")
        for x, y in loader:
            nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()

    with pytest.raises(CaseFailed, match=r"found gradients that mw\.backward did not make"):
        pool(2).run(case)
