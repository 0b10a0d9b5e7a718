"""Models whose weights are split over worker processes: what lies packed, what is saved and loaded, and copies.

Tests parallel/tensor.py, parallel/layout.py, transfer/sharded.py.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers.pytorch_utils import Conv1D

from meshwise.parallel.load import load_weights
from meshwise.parallel.mesh import divide_work
from meshwise.spec.errors import PlanError
from meshwise.spec.plan import Plan
from meshwise.torch_compat.sharding import division
from meshwise.transfer import collectives
from meshwise.transfer.sharded import full_tensor
from tests.parallel.applied import apply_with, backward
from tests.parallel.test_apply import here


def model() -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.TransformerEncoderLayer(8, 4, 16, 0.0, batch_first=True) for _ in range(2)]
    return nn.Sequential(*layers, nn.Linear(8, 6)).double()


class Turned(nn.Module):
    """Packed along dim 1, as GPT-2 is; `shard` divides dim 0."""

    def __init__(self) -> None:
        super().__init__()
        self.c_attn, self.c_proj = Conv1D(24, 8), Conv1D(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.c_attn(x).split(8, dim=2)
        found: Tensor = x + self.c_proj((q * k).tanh() + v)
        return found


def turned() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(Turned(), Turned(), nn.Linear(8, 6)).double()


def step(net: nn.Module, run: Any, **rate: float) -> Tensor:
    optimizer = torch.optim.Adam(net.parameters(), **(rate or {"lr": 0.01}))
    loss: Tensor = net(torch.arange(80.0, dtype=torch.float64).view(2, 5, 8).sin()).pow(2).mean()
    run(loss)
    optimizer.step()
    return loss.detach()


def trained_and_saved(folder: Path, model: Callable[[], nn.Module], plan: Plan, packs: int) -> list[str]:
    """What is wrong of packed weights that were trained, copied, saved, loaded and read; nothing should be."""
    wrong, plain, net = [], model(), model()
    setup = apply_with(net, plan, divide_work(plan, here()))
    packed = [p for p in net.parameters() if isinstance(p, DTensor) and (division(p.placements[-1]) or (0, 1))[1] == 3]
    twin = copy.deepcopy(net) if plan.shard == 1 else net  # FSDP has no copies
    wrong += [] if len(packed) == packs else [f"{len(packed)} packed"]
    step(plain, Tensor.backward)
    step(net, lambda loss: backward(setup, loss))

    def compare(what: str, mine: nn.Module, theirs: nn.Module) -> None:
        for (name, p), wanted in zip(mine.named_parameters(), theirs.parameters(), strict=True):
            if not torch.allclose(full_tensor(p.detach()), wanted.detach(), rtol=0, atol=1e-9):
                wrong.append(f"{what}: {name}")

    compare("trained", net, plain)
    if twin is not net:
        compare("a copy", twin, model())
    norm = nn.utils.get_total_norm([p.grad for p in net.parameters() if p.grad is not None])
    expected = nn.utils.get_total_norm([p.grad for p in plain.parameters() if p.grad is not None])
    wrong += [] if abs(float(norm) - float(expected)) < 1e-9 else ["norm"]
    twin.load_state_dict(plain.state_dict())
    compare("loaded", twin, plain)
    if here().rank == 0:
        save_file(model().state_dict(), folder / "weights.safetensors")
    torch.distributed.barrier()
    load_weights(net, folder / "weights.safetensors")
    compare("read from a file", net, model())
    collectives.divide_among(None)
    held = sum(p.to_local().numel() for p in net.parameters() if isinstance(p, DTensor))
    return wrong + ([] if held < 0.6 * sum(p.numel() for p in net.parameters()) else [f"{held} held"])


def test_packed_weights_are_trained_copied_saved_and_loaded(pool: Any, tmp_path: Path) -> None:
    assert pool(2).run(trained_and_saved, tmp_path, model, Plan(tensor=2), 4) == [[], []]


@pytest.mark.slow
def test_what_is_packed_along_dim_1_is_so_under_shard_too(pool: Any, tmp_path: Path) -> None:
    assert pool(4).run(trained_and_saved, tmp_path, turned, Plan(shard=2, tensor=2), 2) == [[], [], [], []]


def what_says_a_layer_alone(plan: Plan) -> str:
    """A layer of the model is called without the model."""
    net = model()
    apply_with(net, plan, divide_work(plan, here()))
    with pytest.raises(PlanError) as refused:
        net[0](torch.zeros(2, 5, 8, dtype=torch.float64))
    return str(refused.value)


@pytest.mark.parametrize("plan", [Plan(data=2, tensor=2), Plan(shard=2, tensor=2)])
def test_a_layer_that_is_called_without_the_model_is_refused_where_its_gradient_would_not_be_reduced(
    pool: Callable[[int], Any], plan: Plan
) -> None:
    assert "Call it in the model's forward" in pool(4).run(what_says_a_layer_alone, plan)[0]
