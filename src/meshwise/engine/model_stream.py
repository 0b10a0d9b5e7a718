"""Keep random numbers of a program and of its models apart.

Of the view by rank: a program draws the batches that it passes to `mw.split` alike on all ranks. Draws in a model's
forward (dropout) are for this rank's samples, whose number differs between ranks: they must not move the program's
stream, and are keyed by (state of the program's stream, batches since it moved, rank).
"""

from __future__ import annotations

import weakref
import zlib
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from meshwise.engine.seeds import seed_generators, set_states, states
from meshwise.spec.world import World
from meshwise.transfer.splitmix import mixed


class ModelStream:
    """Gives models the random numbers of their forward, once the program has called `mw.split`.

    paused: returns True while models must draw from torch's generator instead. This is so in a loop over a distributed
        loader and in `meshwise check`, which seed that generator for each batch."""

    def __init__(self, world: World, paused: Callable[[], bool]) -> None:
        self._world, self._paused = world, paused
        self._known: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._handles: list[Any] = []
        self._depth = self._key = self._batches = 0  # batches since the program's stream moved
        self._before: Tensor | None = None  # the program's state when the last batch began
        self._program: list[Tensor] = []  # the program's states, while a model runs
        self._states: list[Tensor] | None = None  # of this stream, between two forwards of a batch

    def begin(self, models: Iterable[nn.Module]) -> None:
        """Begin a batch for these models."""
        for model in models:
            if model not in self._known:
                self._known.add(model)
                self._handles.append(model.register_forward_pre_hook(_Hook(self._enter)))
                self._handles.append(model.register_forward_hook(_Hook(self._leave), always_call=True))
        state = torch.get_rng_state()
        moved = self._before is None or not torch.equal(state, self._before)
        self._before, self._batches = state, 0 if moved else self._batches + 1
        self._key = mixed(zlib.crc32(state.numpy().tobytes()), self._batches, self._world.rank)
        self._states = None

    def close(self) -> None:
        """Remove the hooks from the models. From then on, models draw from torch's generator like the rest of the
        program."""
        for handle in self._handles:
            handle.remove()

    def _enter(self) -> None:
        self._depth += 1
        if self._depth > 1 or self._paused():
            return
        self._program = states(self._world.device)
        if self._states is None:
            seed_generators(self._world.device, self._key)
        else:
            set_states(self._world.device, self._states)

    def _leave(self) -> None:
        self._depth -= 1
        if self._depth == 0 and self._program:
            self._states = states(self._world.device)
            set_states(self._world.device, self._program)
            self._program = []


class _Hook:
    """A hook on a model that works only in this process. A copy of the model keeps it, but after unpickling it does
    nothing."""

    def __init__(self, call: Callable[[], None] | None = None) -> None:
        self._call = call

    def __call__(self, *_: object) -> None:
        if self._call is not None:
            self._call()

    def __deepcopy__(self, memo: object) -> _Hook:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return _Hook, ()
