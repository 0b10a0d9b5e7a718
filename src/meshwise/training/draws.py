"""Random draws are keyed, not shared: torch's generators start each step from (seed, step, rank)."""

from __future__ import annotations

import torch

from meshwise.spec.world import World
from meshwise.transfer.splitmix import mixed


def seed_draws(seed: int, step: int, world: World) -> None:
    """Key this rank's random draws (dropout) by (seed, step, rank): a resumed run draws the same, ranks draw apart.

    Rank 0 draws what one device draws.
    """
    key = mixed(seed, step, world.rank)
    torch.default_generator.manual_seed(key)
    if world.device.startswith("cuda"):
        torch.cuda.manual_seed(key)
