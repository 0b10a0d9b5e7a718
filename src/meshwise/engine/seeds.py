"""Seed a rank's random numbers, alike or keyed by step and rank.

A loop over a distributed loader keys all draws of its body by itself, so that there is one stream in it; a program that
calls `mw.split` has two (model_stream.py).
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Callable
from dataclasses import replace

import numpy
import torch
from torch import Tensor

from meshwise.data.generators import GLOBAL
from meshwise.spec.devices import has_streams
from meshwise.spec.world import World
from meshwise.transfer import collectives
from meshwise.transfer.splitmix import mixed


def seed_alike(text: str) -> Callable[[], None]:
    """Let a program that seeds nothing draw the same on every rank: Python and numpy begin anywhere by themselves. For
    torch they do not. text: what all ranks of this run share, and no other run. Returns what takes that back, where
    nothing was drawn or seeded since."""
    before = random.getstate(), numpy.random.get_state(legacy=False)
    seed = zlib.crc32(text.encode())
    random.seed(seed)
    numpy.random.seed(seed)
    seeded = random.getstate(), repr(numpy.random.get_state(legacy=False))

    def take_back() -> None:
        if random.getstate() == seeded[0]:
            random.setstate(before[0])
        if repr(numpy.random.get_state(legacy=False)) == seeded[1]:
            numpy.random.set_state(before[1])

    return take_back


def seed_all(seed: int) -> None:
    """Let torch, Python and numpy draw as after their own calls with this seed: what a program builds is the same on
    every rank."""
    torch.manual_seed(seed)
    random.seed(seed)
    numpy.random.seed(seed % 2**32)


def draw_alike() -> int:
    """Let every rank draw what rank 0 draws from here on, with torch, numpy and Python; gives the seed of rank 0, below
    2**31. Collective."""
    mine = torch.initial_seed(), tuple(handle.state() for handle in GLOBAL)
    seed, states = collectives.broadcast_object(mine)
    if collectives.get_rank() != 0:
        for handle, state in zip(GLOBAL, states, strict=True):
            handle.set_state(state)
    return int(seed) % 2**31


def seed_draws(world: World, *key: int) -> None:
    """Key this rank's random draws (dropout) by `key`, such as (seed, step), and its rank: a resumed run draws the
    same, ranks draw apart. Rank 0 draws what one device draws."""
    seed_generators(world.device, mixed(*key, world.rank))


def seed_generators(device: str, seed: int) -> None:
    """Seed torch's generator, and that of an accelerator."""
    torch.default_generator.manual_seed(seed)
    if has_streams(device):
        torch.get_device_module(device).manual_seed(seed)


def states(device: str) -> list[Tensor]:
    """Of torch's generator, and of an accelerator's, which models draw from."""
    return [torch.get_rng_state(), *([torch.get_device_module(device).get_rng_state()] if has_streams(device) else [])]


def set_states(device: str, kept: list[Tensor]) -> None:
    """Go on from what `states` gave."""
    torch.set_rng_state(kept[0])
    for state in kept[1:]:
        torch.get_device_module(device).set_rng_state(state)


class StepDraws:
    """What an optimizer draws in its step is for parameters: alike on every rank, where draws are keyed by rank."""

    def __init__(self, world: World) -> None:
        self._world = replace(world, rank=0)
        self._last: tuple[int, int] | None = None
        self._steps = 0  # of this batch
        self._before: list[Tensor] = []

    def begins(self, key: tuple[int, int] | None) -> None:
        """A step begins. key: of the batch that is worked on; None before the first whose draws are keyed: the program
        draws alike."""
        if key is None:
            return
        self._last, self._steps = key, self._steps + 1 if key == self._last else 0
        self._before = states(self._world.device)
        seed_draws(self._world, *key, 2**20 + self._steps)

    def ends(self) -> None:
        """It is over: draws go on as they were."""
        if self._before:
            set_states(self._world.device, self._before)
            self._before = []
