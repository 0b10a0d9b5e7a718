"""Keep random numbers of a program and of its models apart.

There are two streams; the program's is the same on every rank.

Draws outside the models' forward (which samples a batch has, noise, an action) are the same on all ranks. Draws in a
model's forward (dropout) are for this rank's samples, whose number differs between ranks: they must not move the
program's stream, and are keyed by (state of the program's stream, batches since it moved, rank). Rank 0 draws what one
device draws.
"""

from __future__ import annotations

import contextlib
import weakref
import zlib
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from meshwise.data.keyed import ExactDraws, KeyedDraws
from meshwise.data.order import BatchSlice
from meshwise.engine.seeds import seed_generators, set_states, states
from meshwise.spec.world import World
from meshwise.transfer.splitmix import mixed


class ModelStream:
    """Gives models the random numbers of their forward, once the program has called `mw.split`.

    draws: makes the random draws that one device would make; None if the user did not request that.
    paused: returns True while models must draw from torch's generator instead. This is so in a loop over a distributed
        loader and in `meshwise check`, which seed that generator for each batch."""

    def __init__(self, world: World, draws: ExactDraws | None, paused: Callable[[], bool]) -> None:
        self._world, self._exact, self._paused = world, draws, paused
        self._known: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._handles: list[Any] = []
        self._depth, self._open = 0, ExitStack()
        self._before: Tensor | None = None  # the program's state when the last batch began
        self._batches = 0  # since that state
        self._key = 0
        self._states: list[Tensor] | None = None  # of this stream, between two forwards of a batch
        self._draws: KeyedDraws | None = None
        self._ran: KeyedDraws | None = None  # of the forward that ran last: a batch may be read before its backward

    def begin(self, part: BatchSlice, models: Iterable[nn.Module]) -> int:
        """Begin a batch for these models. Return the key for random draws of the batch, which is the same on every
        rank."""
        for model in models:
            if model not in self._known:
                self._known.add(model)
                self._handles.append(model.register_forward_pre_hook(_Hook(self._enter)))
                self._handles.append(model.register_forward_hook(_Hook(self._leave), always_call=True))
        state = torch.get_rng_state()
        moved = self._before is None or not torch.equal(state, self._before)
        self._before, self._batches = state, 0 if moved else self._batches + 1
        key = (zlib.crc32(state.numpy().tobytes()), self._batches, 0)
        apart = self._exact is None and not part.whole
        self._key, self._states = mixed(*key[:2], self._world.rank if apart else 0), None
        self._draws = None if self._exact is None or part.whole else self._exact.of_microbatch(key, part)
        return mixed(*key)

    def backward(self) -> AbstractContextManager[None]:
        """Return a context manager for the backward of the last forward. Blocks that are recomputed in it draw the same
        random numbers again."""
        return contextlib.nullcontext() if self._ran is None else self._ran.backward()

    def close(self) -> None:
        """Remove the hooks from the models. From then on, models draw from torch's generator like the rest of the
        program."""
        for handle in self._handles:
            handle.remove()

    def _enter(self) -> None:
        self._depth += 1
        if self._depth > 1 or self._paused():
            return
        device = self._world.device
        self._open.callback(set_states, device, states(device))
        if self._states is None:
            seed_generators(device, self._key)
        else:
            set_states(device, self._states)
        self._open.callback(self._keep)
        self._ran = self._draws
        if self._draws is not None:
            self._open.enter_context(self._draws.backward())

    def _leave(self) -> None:
        self._depth -= 1
        if self._depth == 0:
            self._open.close()

    def _keep(self) -> None:
        self._states = states(self._world.device)


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
