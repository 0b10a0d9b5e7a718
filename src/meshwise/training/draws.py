"""Random draws are keyed, not shared: torch's generators start each step from (seed, step, rank)."""

from __future__ import annotations

import torch

from meshwise.spec.world import World


def seed_draws(seed: int, step: int, world: World) -> None:
    """Key this rank's random draws (dropout) by (seed, step, rank): a resumed run draws the same, ranks draw apart.

    Rank 0 draws what one device draws.
    """
    key = mixed(seed, step, world.rank)
    torch.default_generator.manual_seed(key)
    if world.device.startswith("cuda"):
        torch.cuda.manual_seed(key)


def mixed(*numbers: int) -> int:
    """One number below 2**32, all that torch's CPU generator keeps of a seed, in which each of `numbers` counts.

    The finaliser of splitmix64 (Steele, Lea, Flood, OOPSLA 2014) after each.
    """
    key = 0
    for number in numbers:
        key = (key + number + 0x9E3779B97F4A7C15) % 2**64
        key = (key ^ (key >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
        key = (key ^ (key >> 27)) * 0x94D049BB133111EB % 2**64
        key ^= key >> 31
    return key % 2**32
