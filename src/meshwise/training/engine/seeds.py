"""Seed random numbers equally on all ranks, or by step and rank.

In the body of a loop over a distributed loader, all draws come from one keyed stream. A per-rank program that calls
`mw.split` has two streams (`ModelStream`): one draws the batches, equally on all ranks, and the other draws in a
model's forward (dropout). A forward draws more on a rank with more samples, so it must not move the program's stream.
"""

from __future__ import annotations

import random
import weakref
import zlib
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import numpy
import torch
from torch import Tensor, nn

from meshwise.spec.devices import has_streams
from meshwise.spec.world import World
from meshwise.training.data.generators import GLOBAL, global_states, set_global_states
from meshwise.transfer import collectives
from meshwise.transfer.splitmix import mixed


def seed_alike(text: str) -> Callable[[], None]:
    """Seed Python and NumPy from `text`, so that a program that sets no seeds draws the same numbers on every rank.
    (The initial seed of torch is the same on all ranks anyway.) Return a function that undoes the seeding, unless the
    program has drawn or seeded since.

    text: a text that is equal on all ranks of this run, and different in every other run."""
    before = [handle.state() for handle in GLOBAL[1:]]
    seed = zlib.crc32(text.encode())
    random.seed(seed)
    numpy.random.seed(seed)
    seeded = [handle.state() for handle in GLOBAL[1:]]

    def take_back() -> None:
        for handle, old, new in zip(GLOBAL[1:], before, seeded, strict=True):
            if handle.state() == new:
                handle.set_state(old)

    return take_back


def seed_all(seed: int) -> None:
    """Seed torch, Python and NumPy with `seed`, so that every rank builds the same model."""
    torch.manual_seed(seed)
    random.seed(seed)
    numpy.random.seed(seed % 2**32)


def draw_alike() -> int:
    """Copy the generator states of torch, NumPy and Python from rank 0 to every rank, so that all ranks draw the same
    numbers from now on. Return torch's initial seed on rank 0, modulo 2**31. Collective."""
    seed, states = collectives.broadcast_object((torch.initial_seed(), global_states()))
    if collectives.get_rank() != 0:
        set_global_states(states)
    return int(seed) % 2**31


def seed_draws(world: World, *key: int) -> None:
    """Seed this rank's random draws (dropout) by its rank and by `key`, such as (seed, step)."""
    seed_generators(world.device, mixed(*key, world.rank))


def seed_generators(device: str, seed: int) -> None:
    """Seed torch's CPU generator and, if `device` is an accelerator, the generator of the accelerator."""
    torch.default_generator.manual_seed(seed)
    if has_streams(device):
        torch.get_device_module(device).manual_seed(seed)


def states(device: str) -> list[Tensor]:
    """Return the states of the generators from which models draw: torch's CPU generator and, if `device` is an
    accelerator, the generator of the accelerator."""
    return [torch.get_rng_state(), *([torch.get_device_module(device).get_rng_state()] if has_streams(device) else [])]


def set_states(device: str, kept: list[Tensor]) -> None:
    """Restore the generators to states that `states` returned."""
    torch.set_rng_state(kept[0])
    for state in kept[1:]:
        torch.get_device_module(device).set_rng_state(state)


class StepDraws:
    """Makes the random draws in an optimizer's step equal on all ranks, while draws outside of the step differ by
    rank."""

    def __init__(self, world: World) -> None:
        self._world = replace(world, rank=0)
        self._last: tuple[int, int] | None = None
        self._steps = 0  # number of earlier steps on the current batch
        self._before: list[Tensor] = []

    def begins(self, key: tuple[int, int] | None) -> None:
        """Seed the generators for the random draws of an optimizer's step."""
        if key is None:
            return
        self._last, self._steps = key, self._steps + 1 if key == self._last else 0
        self._before = states(self._world.device)
        seed_draws(self._world, *key, 2**20 + self._steps)

    def ends(self) -> None:
        """Give the generators back the states that they had before the optimizer's step."""
        if self._before:
            set_states(self._world.device, self._before)
            self._before = []


class ModelStream:
    """Gives models the random numbers of their forward, once the program has called `mw.split`. Their key is the state
    of the program's stream, the number of forwards since this state changed, and the rank."""

    def __init__(self, world: World, paused: Callable[[], bool]) -> None:
        self._world, self._paused = world, paused
        self._known: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._handles: list[Any] = []
        self._depth = self._forwards = 0  # numbers of nested forwards, and of forwards since the program's last draw
        self._program: list[Tensor] = []  # the program's generator states when the last forward began
        self._draws = False
        _streams.append(self)

    def follow(self, models: Iterable[nn.Module]) -> None:
        """From now on, give the forwards of these models their own random numbers."""
        for model in models:
            if model not in self._known:
                self._known.add(model)
                self._handles.append(model.register_forward_pre_hook(_enter))
                self._handles.append(model.register_forward_hook(_leave, always_call=True))

    def close(self) -> None:
        """Remove the hooks from the models."""
        _streams.remove(self)
        for handle in self._handles:
            handle.remove()

    def enter(self) -> None:
        """Begin a forward: keep the program's stream, and seed the generators."""
        self._depth += 1
        if self._depth > 1 or self._paused():
            return
        device, before = self._world.device, self._program
        self._program, self._draws = states(device), True
        moved = not before or not torch.equal(before[0], self._program[0])
        self._forwards = 0 if moved else self._forwards + 1
        seed_generators(device, mixed(zlib.crc32(self._program[0].numpy().tobytes()), self._forwards, self._world.rank))

    def leave(self) -> None:
        """End a forward: restore the program's stream."""
        self._depth -= 1
        if self._depth == 0 and self._draws:
            set_states(self._world.device, self._program)
            self._draws = False


_streams: list[ModelStream] = []


def _enter(*_: object) -> None:  # not a method, so that copying a model copies no stream
    for stream in _streams[-1:]:
        stream.enter()


def _leave(*_: object) -> None:
    for stream in _streams[-1:]:
        stream.leave()
