"""Untouched training programs of one device leave on several what they leave on one.

They run through parallel/splits/rows_axis.py, training/whole/backward.py, training/whole/batches.py,
training/whole/call.py, parallel/splits/dispatch.py, training/whole/proof.py, training/whole/reads.py,
parallel/splits/term.py and training/whole/view.py."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock, patch

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import meshwise as mw
from meshwise.spec import errors
from meshwise.training.whole import call
from meshwise.workers.environment import EXACT_RANDOM
from tests.pool import CaseFailed
from tests.training.whole.running import PROGRAMS, SWITCHES, apart, run, whole
from tests.training.whole.shared import Distribute, fit, mlp, step

SIZES, BOUND = [2, 3], 1e-9
OURS = {
    name for name, kind in vars(errors).items() if isinstance(kind, type) and issubclass(kind, errors.MeshwiseError)
}
pytestmark = pytest.mark.filterwarnings("ignore:Converting a tensor with requires_grad")  # LBFGS reads its loss so


def with_dropout(distribute: Distribute) -> Any:
    """Draws its masks in another order than one device does."""
    return fit(
        distribute, lambda model, x, y: F.cross_entropy(model(x), y), nn.Sequential(mlp(8), nn.Dropout(), mlp(3, 8))
    )


class Sliced(nn.Module):
    """Takes a slice of its layers, which is a new module at each call, as transformers' decoders do."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([mlp(6), mlp(3)])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers[:2]:
            x = layer(x)
        return x


def proofs_of_sliced_layers() -> int:
    """How often a model that slices its layers is proven in six calls."""
    with patch.object(call, "prove", Mock(wraps=call.prove)) as proofs:
        whole(lambda distribute: fit(distribute, lambda model, x, y: F.cross_entropy(model(x), y), Sliced()))
    return proofs.call_count


def assert_equal(got: Any, want: Any) -> None:
    far, at = apart(got, want)
    assert far <= BOUND, at


@pytest.mark.parametrize("name", PROGRAMS | SWITCHES)
def test_a_program_is_the_same_twice_on_one_device(name: str) -> None:
    program = (PROGRAMS | SWITCHES)[name]
    far, at = apart(run(program), run(program))
    assert far == 0, at


@pytest.mark.parametrize(
    ("name", "size"),
    [
        pytest.param(name, size, marks=[pytest.mark.slow] if size == 3 and number % 6 else [])
        for size in SIZES
        for number, name in enumerate(PROGRAMS)
    ],
)
def test_a_program_leaves_what_one_device_leaves(name: str, size: int, pool: Any) -> None:
    for got in pool(size).run(whole, PROGRAMS[name], timeout=30):
        assert_equal(got, run(PROGRAMS[name]))


@pytest.mark.parametrize("name", SWITCHES)
def test_a_model_that_begins_to_mix_rows_is_equal_or_caught(name: str, pool: Any) -> None:
    try:
        results = pool(2).run(whole, SWITCHES[name])
    except CaseFailed as failed:
        assert failed.kind in OURS, failed
        return
    for got in results:
        assert_equal(got, run(SWITCHES[name]))


def test_a_slice_of_layers_is_no_new_layer(pool: Any) -> None:
    assert pool(2).run(proofs_of_sliced_layers) == [1, 1]


def test_ranks_with_dropout_end_alike(pool: Any) -> None:
    first, *others = pool(3).run(whole, with_dropout)
    for other in others:
        assert apart(other, first)[0] == 0


def by_hand(distribute: Distribute, *, twice: bool = False) -> list[float]:
    """Steps whose gradients `torch.autograd.grad` returns. twice: of a loss with a penalty on them."""
    data = TensorDataset(torch.randn(20, 6), torch.randint(3, (20,)))
    model = mlp(3, 6)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    model, optimizer, loader = distribute(model, optimizer, DataLoader(data, 8, shuffle=True))
    losses, parameters = [], list(model.parameters())
    for x, y in loader:
        loss = F.cross_entropy(model(x), y)
        gradients = torch.autograd.grad(loss, parameters, create_graph=twice)
        for p, gradient in zip(parameters, gradients, strict=True):
            p.grad = gradient.detach()
        losses += [loss.item(), nn.utils.clip_grad_norm_(parameters, 0.1).item()]
        optimizer.step()
    return losses


def planned(file: Path, twice: bool = False) -> Any:
    """What a rank leaves under the plan of a file."""
    with patch.dict(os.environ, MESHWISE_PLAN=str(file)):
        return whole(partial(by_hand, twice=twice))


@pytest.mark.parametrize("plan", ["shard = 2", "tensor = 2"])
def test_gradients_of_divided_parameters_are_returned_once(plan: str, pool: Any, tmp_path: Path) -> None:
    file = tmp_path / "plan.toml"
    file.write_text(plan)
    for got in pool(2).run(planned, file):
        assert_equal(got, run(by_hand))
    if "shard" in plan:
        with pytest.raises(CaseFailed, match="accepts only parameters, and no create_graph"):
            pool(2).run(planned, file, True)


def attacked(distribute: Distribute, data: bool) -> None:
    """Sets the gradient of a batch to zero in place."""
    for (x,) in distribute(DataLoader(TensorDataset(torch.randn(8, 4)), 4)):
        x.requires_grad_()
        x.square().sum().backward()
        (x.grad.data if data else x.grad).zero_()


def attacks(data: bool) -> None:
    whole(lambda distribute: attacked(distribute, data))


@pytest.mark.parametrize("data", [False, True])
def test_a_write_into_the_gradient_of_a_batch_is_refused(data: bool, pool: Any) -> None:
    with pytest.raises(CaseFailed, match=r"Write x\.grad = None"):
        pool(2).run(attacks, data)


class Attends(nn.Module):
    """Attention with dropout, dropout of a transposed batch, and noise of a function written in Python."""

    def __init__(self) -> None:
        super().__init__()
        self.attend = nn.MultiheadAttention(8, 2, dropout=0.5, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        z: Tensor = self.attend(x, x, x, need_weights=False)[0]
        return F.gumbel_softmax(F.dropout(z.transpose(0, 1), 0.5).transpose(0, 1))


def attends(distribute: Distribute) -> list[float]:
    model = Attends()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    model, optimizer, loader = distribute(model, optimizer, DataLoader(torch.randn(21, 5, 8), 6))
    return [step(model(x).square().mean(), optimizer) for x in loader]


def attends_exactly() -> list[float]:
    with patch.dict(os.environ, {EXACT_RANDOM: "1"}):
        found: list[float] = whole(attends)
        return found


def test_draws_in_functions_of_torch_are_those_of_one_device(pool: Any) -> None:
    first, *others = (pool(size).run(attends_exactly)[0] for size in (1, 2, 3))
    for other in others:
        assert_equal(other, first)


def viewed() -> list[int]:
    mw.distribute(nn.Linear(2, 2))
    found: list[int] = mw.split(torch.arange(28).view(7, 4), dim=1).view(-1).tolist()
    return found


def test_what_is_split_by_columns_can_be_viewed(pool: Any) -> None:
    assert pool(2).run(viewed) == [list(range(28))] * 2
