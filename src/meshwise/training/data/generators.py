"""Manage the random generators that draw the order of data.

On one device they draw as in plain torch. On several devices, all ranks draw from the states of rank 0's generators.

Draws inside a training loop come from a torch generator that is seeded for each step (`training/engine/seeds.py`).
While a loop is open, the state of the program's own torch generator is therefore set aside. A loader draws from the
program's generator (an iterator's base seed, the seed of a shuffled epoch), at the time when torch's DataLoader would
draw. So an order depends on earlier draws, but not on the draws inside a loop.
"""

from __future__ import annotations

import contextlib
import ctypes
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import numpy
import torch

from meshwise.transfer import collectives

T = TypeVar("T")
MT19937_BYTES = 624 * 4 + 4
"""Size of `mt19937_state` in numpy's `mt19937.h`: the key and the position."""
States = tuple[Any, ...]
"""States of several generators, as bytes and numbers, which can be compared and sent to other ranks."""


@dataclass(frozen=True)
class Handle:
    """How to read and set the state of a random generator."""

    state: Callable[[], Any]
    set_state: Callable[[Any], None]


def _torch_handle(generator: torch.Generator) -> Handle:
    def set_state(state: bytes) -> None:
        generator.set_state(torch.frombuffer(bytearray(state), dtype=torch.uint8))

    return Handle(lambda: generator.get_state().numpy().tobytes(), set_state)


class _NumpyState:
    """Returns the state of numpy's global generator: the key, the position, whether a normal number is cached, and that
    number."""

    def __init__(self) -> None:
        self._memory, self._state = b"", (b"", 0, 0, 0.0)

    def __call__(self) -> States:
        generator = numpy.random.get_bit_generator()  # type: ignore[attr-defined]
        known = isinstance(generator, numpy.random.MT19937)
        memory = ctypes.string_at(generator.ctypes.state_address, MT19937_BYTES) if known else b""
        if not memory or memory != self._memory:
            state: Any = numpy.random.get_state(legacy=True)
            self._state = (state[1].tobytes(), *state[2:])
            self._memory = memory if self._state[2] == 0 else b""
        return self._state


def _set_numpy_state(state: States) -> None:
    numpy.random.set_state(("MT19937", numpy.frombuffer(state[0], dtype=numpy.uint32), *state[1:]))


TORCH = _torch_handle(torch.default_generator)
NUMPY = Handle(_NumpyState(), _set_numpy_state)
GLOBAL = (TORCH, NUMPY, Handle(random.getstate, random.setstate))
"""The generators of torch, numpy and Python from which code draws if it is given no generator."""


def global_states() -> States:
    """Return the states of the generators in `GLOBAL`."""
    return tuple(handle.state() for handle in GLOBAL)


def set_global_states(states: States) -> None:
    """Set the states of the generators in `GLOBAL`."""
    for handle, state in zip(GLOBAL, states, strict=True):
        handle.set_state(state)


def packed(states: Any) -> Any:
    """Convert generator states to values that JSON can hold. Bytes become hexadecimal text."""
    if isinstance(states, bytes):
        return states.hex()
    return [packed(state) for state in states] if isinstance(states, tuple) else states


def unpacked(states: Any) -> Any:
    """Convert what `packed` returned back to generator states."""
    if isinstance(states, str):
        return bytes.fromhex(states)
    return tuple(unpacked(state) for state in states) if isinstance(states, list | tuple) else states


def handles_of(*holders: Any) -> tuple[Handle, ...]:
    """Return handles of the generators of loaders and samplers (attribute `generator`), each once."""
    found = {id(g): g for holder in holders if isinstance(g := getattr(holder, "generator", None), torch.Generator)}
    return tuple(_torch_handle(generator) for generator in found.values())


@dataclass(frozen=True)
class Draws:
    """Two functions that draw an epoch's order by calling a given function. `begin` draws from a recorded state of the
    generators if there is one, `go_on` from their present state."""

    begin: Callable[[Callable[[], Any]], Any]
    go_on: Callable[[Callable[[], Any]], Any]


class ProgramGenerator:
    """Keeps the state of torch's global generator for the program's own draws. Inside a training or evaluation loop,
    meshwise seeds the generator for each step. The program's state is restored after the loop."""

    def __init__(self) -> None:
        self._loops = 0
        self._state = torch.empty(0)  # the program's generator state while a loop runs
        self.seeded = True
        """Whether loops are seeded for each step. If not, they draw from the program's state, as on one device."""

    @property
    def in_loop(self) -> bool:
        """Whether the program is inside a training or evaluation loop over batches."""
        return self._loops > 0

    @contextlib.contextmanager
    def loop(self) -> Iterator[None]:
        """Return a context manager for a loop. Draws in it do not affect torch's generator outside of it."""
        if not self.seeded:
            yield
            return
        outer = torch.get_rng_state()
        if self._loops == 0:
            self._state = outer
        self._loops += 1
        try:
            yield
        finally:
            self._loops -= 1
            torch.set_rng_state(outer if self._loops else self._state)

    @contextlib.contextmanager
    def drawing(self) -> Iterator[None]:
        """Return a context manager for draws from the program's own random state."""
        if self._loops == 0:
            yield
            return
        keyed = torch.get_rng_state()
        torch.set_rng_state(self._state)
        try:
            yield
        finally:
            self._state = torch.get_rng_state()
            torch.set_rng_state(keyed)


class OrderGenerators:
    """The generators from which a loader draws its order. Their states can be read, set and replayed."""

    def __init__(self, program: ProgramGenerator, handles: tuple[Handle, ...]) -> None:
        self._program, self._handles = program, handles

    def states(self) -> States:
        """Return the states of the generators from which the order is drawn."""
        with self._program.drawing():
            return tuple(handle.state() for handle in self._handles)

    def set_states(self, states: States) -> None:
        """Set the states of the generators from which the order is drawn."""
        with self._program.drawing():
            for handle, state in zip(self._handles, states, strict=True):
                handle.set_state(state)

    def take_rank_0s(self) -> States:
        """Set every rank's generators to the states of rank 0's generators, and return them. Collective."""
        own = self.states()
        states: States = collectives.broadcast_object(own)
        if states != own:
            self.set_states(states)
        return states

    def draws(self, states: States, *, again: bool) -> Draws:
        """Return the functions that draw an epoch's order. `begin` draws from `states` if `again` is set."""
        return Draws(partial(self._replay, states) if again else self._live, self._live)

    def _live(self, function: Callable[[], T]) -> T:
        with self._program.drawing():
            return function()

    def _replay(self, states: States, function: Callable[[], T]) -> T:
        now = self.states()
        self.set_states(states)
        try:
            return self._live(function)
        finally:
            self.set_states(now)
