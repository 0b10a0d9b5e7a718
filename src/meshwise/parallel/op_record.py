"""Record a constructor's operators on fake tensors.

The record also tells which random numbers the operators would draw.

torch has no hook for code that sets a generator. So each random operator advances the real generator by one number,
which gives every entry of the record a distinct generator state. If the state has changed otherwise, the program has
set the generator, or has restored its state at a known entry.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from meshwise.parallel.op_replay import Entry, RecordedOp, ReplayMismatch, SetGenerator, StorageView, replay
from meshwise.spec.errors import UsageError
from meshwise.torch_compat import fake
from meshwise.torch_compat.dispatch import StorageMap, is_fake, operator_name, without_interception, written_arguments
from meshwise.torch_compat.tree import leaves_of, map_kind, map_leaves, map_tensors, tensors_in

Loaded = Callable[[Tensor, torch.device | str], Tensor]
"""Called with a tensor sharded like the wanted tensor, and a device. Returns this rank's part of the wanted tensor."""

PLAIN = (int, float, str, list, tuple, dict)
"""The types of operator arguments that `OpRecord.digest` hashes. Arguments of other types are left out."""


class OpRecord:
    """A record of the operators that ran on fake tensors, in order, and of the random numbers that they would draw."""

    def __init__(self) -> None:
        self.entries: list[Entry] = []
        self.mode = fake.FakeTensors(self._handle, owner=self)
        self.start = torch.default_generator.get_state()
        self.left: dict[torch.Generator, bytes] = {}
        self.loaded: dict[int, Loaded] = {}
        """Maps the number of a storage that is loaded from a file to a function that reads this rank's part of it."""
        self.loaded_after = 0
        self._storages = StorageMap()
        self._count = 0
        self._last: dict[torch.Generator, bytes] = {torch.default_generator: _key(torch.default_generator)}
        self._marks = {(torch.default_generator, self._last[torch.default_generator]): -1}

    @property
    def operators(self) -> list[RecordedOp]:
        """The recorded operators. Entries of another kind, which set the state of a random generator, are left out."""
        return [entry for entry in self.entries if isinstance(entry, RecordedOp)]

    def leave(self) -> None:
        """Record the state of each random generator at the end of the block of `mw.deferred`."""
        for generator in self._last:
            self._note_generator(generator)
        self.left = dict(self._last)

    def _handle(self, operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any], run: Callable[[], Any]) -> Any:
        for tensor in tensors_in(written_arguments(operator, args, kwargs)):
            if not is_fake(tensor):
                raise ReplayMismatch(f"{operator_name(operator)} writes into a tensor made outside of mw.deferred.")
        before, after = map_kind((Tensor, torch.UntypedStorage), self.known, (args, kwargs)), None
        generator = None
        if fake.is_random(operator):
            generator = kwargs.get("generator") or fake.own_generator(_device(args, kwargs))
            self._note_generator(generator)
        try:
            result = run()
        except fake.NEEDS_VALUES:
            result = after = self._compute(operator, before)
            if not any(True for _ in tensors_in(after)):
                return after
            result = map_tensors(self.mode.from_tensor, after)
        self._add(operator, before, result, generator)
        if generator is not None:
            self._tick(generator)
        return result

    def _add(self, operator: Any, before: Any, result: Any, generator: torch.Generator | None) -> None:
        arguments, keywords = before
        reads = {view.storage for view in leaves_of(StorageView, before)}
        views = map_tensors(self._view_of, result)
        made = {view.storage for view in leaves_of(StorageView, views)} - reads
        written = {view.storage for view in leaves_of(StorageView, written_arguments(operator, arguments, keywords))}
        self.entries.append(
            RecordedOp(
                operator,
                operator_name(operator),
                arguments,
                keywords,
                views,
                frozenset(reads),
                frozenset(written),
                frozenset(made),
                generator,
                torch.get_default_dtype(),
            )
        )

    def known(self, value: Any) -> Any:
        """Return the `StorageView` for a fake tensor, or any other value unchanged."""
        if isinstance(value, torch.UntypedStorage) or (is_fake(value) and self._storages.get(value) is None):
            raise ReplayMismatch("a tensor was read from a file, or made outside of torch's operators.")
        return self._view_of(value)

    def _view_of(self, value: Any) -> Any:
        if not is_fake(value):
            return value
        if value.layout != torch.strided or value.is_conj() or value.is_neg():
            raise ReplayMismatch(f"cannot record a sparse tensor, or a lazy conjugate or negation ({value.layout}).")
        number = self._storages.get(value)
        if number is None:
            number, self._count = self._count, self._count + 1
            self._storages.set(value, number)
        return StorageView(
            number,
            value.untyped_storage().nbytes(),
            value.dtype,
            value.device,
            tuple(value.shape),
            tuple(value.stride()),
            int(value.storage_offset()),
        )

    def _note_generator(self, generator: torch.Generator) -> None:
        """Add a `SetGenerator` to `entries` if the program has set the generator since this record last looked at
        it."""
        key = _key(generator)
        if self._last.get(generator) != key:
            known = self._marks.get((generator, key))
            self.entries.append(SetGenerator(generator, generator.get_state() if known is None else known))
            self._mark(generator)

    def _tick(self, generator: torch.Generator) -> None:
        """Draw a random number after a random operator, to give the generator a state that occurs nowhere else. The
        record recognizes this state if the program later returns to it."""
        with without_interception():
            torch.rand(1, generator=generator, device=generator.device)
        self._mark(generator)

    def _mark(self, generator: torch.Generator) -> None:
        """Remember the current state of the generator as its state after the newest entry of `entries`."""
        key = self._last[generator] = _key(generator)
        self._marks[generator, key] = len(self.entries) - 1

    def _compute(self, operator: Any, before: Any) -> Any:
        """Compute the result of an operator now, by replaying the operators that its arguments depend on."""
        found: dict[int, torch.UntypedStorage] = {}
        states = {generator: generator.get_state() for generator in self._last}
        with without_interception():
            try:
                torch.default_generator.set_state(self.start)
                replay(self.entries, {view.storage for view in leaves_of(StorageView, before)}, found.__setitem__)
            finally:
                for generator, state in states.items():
                    generator.set_state(state)
            args, kwargs = map_kind(StorageView, lambda view: view.of(found[view.storage]), before)
            with torch.no_grad():
                return operator(*args, **kwargs)

    def digest(self) -> str:
        """Return a hash of the record, which is equal on all ranks that have recorded the same operators."""
        digest = hashlib.sha256()
        for entry in self.operators:
            plain = map_leaves(lambda v: None, (entry.args, entry.kwargs), lambda v: not isinstance(v, PLAIN))
            sizes = [view.size for view in leaves_of(StorageView, (entry.args, entry.result))]
            digest.update(f"{entry.name}{sizes}{plain}".encode())
        return digest.hexdigest()

    def drawn_from(self) -> tuple[Any, ...]:
        """Return the arguments of `draw_from`: the start state, and for each entry that sets a generator, the generator
        and its new state."""
        numbers = {generator: number for number, generator in enumerate(self._last)}
        places = enumerate(self.entries)
        return self.start, {n: (numbers[e.generator], e.to) for n, e in places if isinstance(e, SetGenerator)}

    def draw_from(self, start: Tensor, settings: dict[int, tuple[int, Tensor | int]]) -> None:
        """Change this record so that its replay draws the random numbers of another rank."""
        generators, operators = list(self._last), self.operators
        self.start, own = start, iter(operators)
        self.entries = [
            SetGenerator(generators[settings[n][0]], settings[n][1]) if n in settings else next(own)
            for n in range(len(operators) + len(settings))
        ]

    def check_loaded(self) -> None:
        """Raise UsageError if the program has computed with weights after `mw.load_weights` loaded them."""
        for entry in self.operators[self.loaded_after :]:
            if not self.loaded.keys().isdisjoint(entry.reads):
                raise UsageError(
                    f"the model was changed ({entry.name}) after mw.load_weights, before its tensors had values. "
                    "Change the model first, and then load the weights."
                )

    def undraw(self) -> None:
        """Set the random generators back, as if the recorded operators had drawn nothing."""
        for entry in reversed(self.entries):
            if isinstance(entry, SetGenerator) and isinstance(entry.to, Tensor):
                entry.generator.set_state(entry.to)
        torch.default_generator.set_state(self.start)

    def rewind(self) -> Callable[[], None]:
        """Set the default generator to its state at the beginning of the record. Return a function that ends the
        replay: it restores generators that were used since."""
        moved = {generator: generator.get_state() for generator, left in self.left.items() if _key(generator) != left}
        torch.default_generator.set_state(self.start)

        def end() -> None:
            for generator, now in moved.items():
                generator.set_state(now)

        return end


def record_of(tensor: Tensor) -> OpRecord:
    """Return the record that contains a fake tensor. Raise UsageError if the tensor belongs to no record."""
    record = fake.owner_of(tensor)
    if not isinstance(record, OpRecord):
        raise UsageError("the model has fake tensors that mw.deferred did not make. Build it inside mw.deferred.")
    return record


def _device(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.device:
    first = next(tensors_in((args, kwargs)), None)
    return torch.device(kwargs.get("device") or (first.device if first is not None else "cpu"))


def _key(generator: torch.Generator) -> bytes:
    with without_interception():
        return generator.get_state().numpy().tobytes()
