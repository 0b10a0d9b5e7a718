"""Untouched training programs of one device leave on several what they leave on one.

They run through whole/axis.py, whole/backward.py, whole/batches.py, whole/call.py, whole/dispatch.py, whole/proof.py,
whole/reads.py, splits/term.py and whole/view.py."""

from __future__ import annotations

from typing import Any
from unittest.mock import Mock, patch

import pytest
from torch import Tensor, nn
from torch.nn import functional as F

from meshwise.spec import errors
from meshwise.whole import call
from tests.pool import CaseFailed
from tests.whole.running import PROGRAMS, SWITCHES, apart, run, whole
from tests.whole.shared import Distribute, fit, mlp

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
