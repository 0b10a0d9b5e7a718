"""A model that draws random numbers in its forward is said to, as one with dropout is. Of parallel/rng_notes.py."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from meshwise.parallel.apply import apply
from meshwise.parallel.rng_notes import DRAWS_NOTE, DROPOUT_NOTE
from meshwise.spec.plan import Plan
from meshwise.spec.world import World
from meshwise.transfer import collectives


class Noisy(nn.Module):
    """Draws in a method that its forward calls."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))

    def _noise(self, x: Tensor) -> Tensor:
        return torch.randn_like(x)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight + self._noise(x)


class StartsAnywhere(nn.Module):
    """Draws its start values alone."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(2))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight)
        self.weight.data.uniform_(0, 1)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


def notes(model: type[nn.Module]) -> tuple[str, ...]:
    """What is said of random numbers."""
    world = World(rank=collectives.get_rank(), size=collectives.world_size())
    setup = apply(model(), Plan(data=2), world)
    return tuple(note for note in setup.notes if note in (DRAWS_NOTE, DROPOUT_NOTE))


@pytest.mark.parametrize(
    ("model", "said"),
    [(Noisy, (DRAWS_NOTE,)), (StartsAnywhere, ()), (nn.Dropout, (DROPOUT_NOTE,))],
)
def test_a_model_that_draws_is_said_to(model: Any, said: tuple[str, ...], pool: Any) -> None:
    assert pool(2).run(notes, model) == [said, said]
