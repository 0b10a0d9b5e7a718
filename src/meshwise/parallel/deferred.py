"""Deferred construction: a model too large for one device is built on fake tensors, then filled in shard by shard.

The constructor runs once, with shapes and no values, and its operators are recorded; so are those that come later, such
as `model.half()`. Once the plan has divided the parameters, each rank replays the record from rank 0's random numbers
and keeps its part of each tensor: bitwise what one device would hold. It never holds more than its parts and about one
whole parameter, and nothing is sent.

A constructor that looks at a value (`.item()`) gets it: what the value depends on is replayed then and there.
"""

from __future__ import annotations

import contextlib
import hashlib
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

from meshwise.compat import fake
from meshwise.compat.dispatch import StorageFacts, name_of, operators_unseen, tensors_in, written_by
from meshwise.parallel.replay import Call, Entry, Place, Turn, Unlike, mapped, places_in, replay
from meshwise.spec.errors import PlanError, UsageError
from meshwise.transfer import collectives
from meshwise.transfer.tree import map_tensors


@contextlib.contextmanager
def deferred() -> Iterator[None]:
    """Models built inside have shapes and no values yet: `with mw.deferred(): model = Net()`.

    `mw.distribute` (or a Job's plan) then gives each rank its part, with the values of a plain construction. Draw no
    random numbers between the two: they would not be those of a plain run.
    """
    record = _Record()
    with warnings.catch_warnings(), record.mode:
        warnings.filterwarnings("ignore", "Accessing the data pointer of FakeTensor")  # copy.deepcopy does
        try:
            yield
        except (RuntimeError, Unlike) as error:
            if isinstance(error, torch.OutOfMemoryError):
                raise
            raise UsageError(
                f"mw.deferred runs a constructor without values, and this one needs them: {str(error).splitlines()[0]} "
                "Build the model outside of mw.deferred, or compute this value without torch (numpy, math)."
            ) from error
    record.leave()


def constructed(make: Callable[[], nn.Module]) -> tuple[nn.Module, str]:
    """What `make` builds, deferred; and a note where it cannot be built so and is built plainly."""
    state = torch.get_rng_state()
    try:
        with deferred():
            return make(), ""
    except UsageError as error:
        torch.set_rng_state(state)
        reason = str(error.__cause__ or error).splitlines()[0]
        return make(), f"the model was built whole on every rank: its constructor needs values ({reason})"


@dataclass(frozen=True)
class Held:
    """A deferred model whose tensors are on the meta device for now, and what they will be.

    tensors: by (name of the module, name in it); attributes: those that are neither parameter nor buffer.
    """

    record: _Record
    tensors: dict[tuple[str, str], Place]
    attributes: dict[tuple[str, str], Any]
    own: dict[tuple[str, str], dict[str, Any]] = field(default_factory=dict)


class _Record:
    """The operators on fake tensors, in their order, and what random numbers they would draw."""

    def __init__(self) -> None:
        self.entries: list[Entry] = []
        self.mode = fake.FakeTensors(self._handle)
        self.start = torch.default_generator.get_state()
        self.left = b""
        self._storages = StorageFacts()
        self._count = 0
        self._last: dict[torch.Generator, bytes] = {torch.default_generator: _key(torch.default_generator)}
        self._marks: dict[bytes, int] = {self._last[torch.default_generator]: -1}

    def leave(self) -> None:
        """The constructor is over: remember where the random numbers are now."""
        self._turns(torch.default_generator)
        self.left = _key(torch.default_generator)

    def _handle(self, operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any], run: Callable[[], Any]) -> Any:
        for tensor in written_by(operator, args, kwargs):
            if not fake.is_fake(tensor):
                raise Unlike(f"{name_of(operator)} writes a tensor that was made outside of it.")
        before, after = mapped((args, kwargs), self._place), None
        random = fake.is_random(operator)
        if random:
            generator = kwargs.get("generator") or fake.own_generator(_device(args, kwargs))
            self._turns(generator)
        try:
            result = run()
        except fake.NEEDS_VALUES:
            result = after = self._look(operator, before)
            if not any(True for _ in tensors_in(after)):
                return after
            result = mapped(after, lambda v: self.mode.fake_of(v) if isinstance(v, Tensor) else v)
        self._add(operator, before, result, random)
        if random:
            self._tick(generator)
        return result

    def _add(self, operator: Any, before: Any, result: Any, random: bool) -> None:
        arguments, keywords = before
        reads = {place.storage for place in places_in(before)}
        places = mapped(result, self._place)
        made = {place.storage for place in places_in(places)} - reads
        written = {place.storage for place in written_places(operator, arguments, keywords)}
        self.entries.append(
            Call(
                operator,
                name_of(operator),
                arguments,
                keywords,
                places,
                frozenset(reads),
                frozenset(written),
                frozenset(made),
                random,
                torch.get_default_dtype(),
            )
        )

    def _place(self, value: Any) -> Any:
        """Where a fake tensor lies; anything else is as it is."""
        if not fake.is_fake(value):
            return value
        if value.layout != torch.strided or value.is_conj() or value.is_neg():
            raise Unlike(f"a tensor of layout {value.layout} cannot be recorded.")
        number = self._storages.get(value)
        if number is None:
            number, self._count = self._count, self._count + 1
            self._storages.set(value, number)
        return Place(
            number,
            value.untyped_storage().nbytes(),
            value.dtype,
            value.device,
            tuple(value.shape),
            tuple(value.stride()),
            int(value.storage_offset()),
        )

    def _turns(self, generator: torch.Generator) -> None:
        """Notice that the program has set a generator: torch tells nobody."""
        key = _key(generator)
        if self._last.get(generator) != key:
            known = self._marks.get(key) if generator is torch.default_generator else None
            self.entries.append(Turn(generator, generator.get_state() if known is None else known))
            self._last[generator] = key

    def _tick(self, generator: torch.Generator) -> None:
        """Each random operator leaves the generator in a state of its own, so that one put back is known again."""
        with operators_unseen():
            torch.rand(1, generator=generator, device=generator.device)
        key = self._last[generator] = _key(generator)
        if generator is torch.default_generator:
            self._marks[key] = len(self.entries) - 1

    def _look(self, operator: Any, before: Any) -> Any:
        """What an operator gives on the values that its arguments will have."""
        found: dict[int, torch.UntypedStorage] = {}
        states = {generator: generator.get_state() for generator in self._last}
        with operators_unseen():
            try:
                torch.default_generator.set_state(self.start)
                replay(self.entries, {place.storage for place in places_in(before)}, found.__setitem__)
            finally:
                for generator, state in states.items():
                    generator.set_state(state)
            args, kwargs = mapped(before, lambda v: v.of(found[v.storage]) if isinstance(v, Place) else v)
            with torch.no_grad():
                return operator(*args, **kwargs)

    def digest(self) -> str:
        """Of what was recorded: the same on all ranks whose constructors did the same."""
        told = hashlib.sha256()
        for entry in self.entries:
            if isinstance(entry, Call):
                plain = mapped((entry.args, entry.kwargs), lambda v: v if isinstance(v, int | float | str) else None)
                sizes = [place.size for place in places_in((entry.args, entry.result))]
                told.update(f"{entry.name}{sizes}{plain}".encode())
        return told.hexdigest()

    def put_back(self) -> Callable[[], None]:
        """Begin a replay: the generator is as it was at the start. What is given ends it: a program that drew nothing
        since goes on where a plain construction would have left it."""
        now, untouched = torch.get_rng_state(), _key(torch.default_generator) == self.left
        torch.default_generator.set_state(self.start)

        def end() -> None:
            if not untouched:
                torch.set_rng_state(now)

        return end


def hold(model: nn.Module) -> Held | None:
    """Put meta tensors in the place of the fake ones of a deferred `model`; None where it has none."""
    fakes = {key: t for key, t in _tensors(model).items() if fake.is_fake(t)}
    if not fakes:
        return None
    records = {id(fake.mode_of(t)): fake.mode_of(t) for t in fakes.values()}
    if len(records) > 1:
        raise UsageError("the models were built in several mw.deferred blocks. Build them in one.")
    mode = next(iter(records.values()))
    if not isinstance(mode, fake.FakeTensors):
        raise UsageError("the model holds fake tensors of another mode. Build it inside mw.deferred.")
    record: _Record = mode.handler.__self__  # type: ignore[attr-defined]
    held = Held(record, {}, {})
    metas: dict[int, Tensor] = {}
    for key, t in fakes.items():
        held.tensors[key] = record._place(t)
        held.own[key] = fake.own_attributes(t)
        if id(t) not in metas:
            with operators_unseen():
                meta = torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="meta")
            metas[id(t)] = nn.Parameter(meta, t.requires_grad) if isinstance(t, nn.Parameter) else meta
        _put(model, key, metas[id(t)], held.own[key])
    for name, module in model.named_modules():
        for attribute, value in vars(module).items():
            if isinstance(value, Tensor | list | tuple | dict) and attribute[:1] != "_":
                places = [record._place(t) for t in tensors_in(value) if fake.is_fake(t)]
                if places:
                    held.attributes[name, attribute] = value
    return held


def materialise(model: nn.Module, device: torch.device | str = "cpu") -> None:
    """Give the tensors of a deferred model their values, whole, on `device`; any other model stays as it is."""
    held = hold(model)
    if held is not None:
        fill(held, model, device)


def fill(held: Held, model: nn.Module, device: torch.device | str) -> None:
    """Replay the record of a deferred `model`, and put this rank's part of each tensor in its place on `device`.

    Where a parameter was divided meanwhile, each rank keeps its part, as soon as the parameter is known. Collective:
    all ranks start from rank 0's random numbers, and must have built the same.
    """
    record = held.record
    if collectives.world_size() > 1:
        start, digest = collectives.broadcast_object((record.start, record.digest()))
        if not all(collectives.gather_objects(digest == record.digest())):
            raise PlanError(
                "the model's constructor did not do the same on every rank. Seed what it draws outside of torch "
                "(random, numpy) with the same number on every rank."
            )
        record.start = start
    attributes: dict[int, Tensor] = {}
    wanted: dict[int, list[tuple[Place, Tensor | tuple[str, str]]]] = {}
    for key, place in held.tensors.items():
        wanted.setdefault(place.storage, []).append((place, key))
    for value in held.attributes.values():
        for t in tensors_in(value):
            if fake.is_fake(t):
                place = record._place(t)
                wanted.setdefault(place.storage, []).append((place, t))
    now = _tensors(model)
    new: dict[int, Tensor] = {}

    def finished(number: int, storage: torch.UntypedStorage) -> None:
        made: dict[Place, Tensor] = {}
        for place, to in wanted[number]:
            whole = made.setdefault(place, place.of(storage))
            if isinstance(to, Tensor):
                attributes[id(to)] = whole
                continue
            old = now[to]
            if id(old) not in new:
                value = _part(whole.to(old.dtype), old, device)
                new[id(old)] = nn.Parameter(value, old.requires_grad) if isinstance(old, nn.Parameter) else value
            _put(model, to, new[id(old)], held.own[to])

    end = record.put_back()
    replay(record.entries, wanted, finished)
    end()
    for (name, attribute), value in held.attributes.items():
        setattr(model.get_submodule(name), attribute, map_tensors(lambda t: attributes.get(id(t), t), value))


def _part(whole: Tensor, like: Tensor, device: torch.device | str) -> Tensor:
    """`whole` on `device`, or this rank's part of it where `like` is divided over ranks; of its own memory then."""
    if not isinstance(like, DTensor):
        return whole.to(device)
    part, mesh = whole, like.device_mesh
    for axis, placement in enumerate(like.placements):
        if isinstance(placement, Shard):
            parts = part.chunk(mesh.size(axis), placement.dim)
            own = mesh.get_local_rank(axis)
            part = parts[own] if own < len(parts) else part.narrow(placement.dim, 0, 0)
    part = part.clone(memory_format=torch.contiguous_format).to(device)
    return DTensor.from_local(part, mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride())


def _tensors(model: nn.Module) -> dict[tuple[str, str], Tensor]:
    """Every parameter and buffer, by the module's name and its own in it; tied ones under each of their names."""
    found: dict[tuple[str, str], Tensor] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        found |= {(name, own): p for own, p in module.named_parameters(recurse=False, remove_duplicate=False)}
        found |= {(name, own): b for own, b in module.named_buffers(recurse=False, remove_duplicate=False)}
    return found


def _put(model: nn.Module, key: tuple[str, str], tensor: Tensor, attributes: dict[str, Any]) -> None:
    module, own = model.get_submodule(key[0]), key[1]
    for name, value in attributes.items():
        setattr(tensor, name, value)
    if isinstance(tensor, nn.Parameter):
        module.register_parameter(own, tensor)
    else:
        setattr(module, own, tensor)


def written_places(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Place]:
    """The Places among the arguments that the operator writes."""
    found: list[Place] = []
    for index, argument in enumerate(operator._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            found += places_in(args[index] if index < len(args) else kwargs.get(argument.name))
    return found


def _device(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.device:
    first = next(tensors_in((args, kwargs)), None)
    return torch.device(kwargs.get("device") or (first.device if first is not None else "cpu"))


def _key(generator: torch.Generator) -> bytes:
    with operators_unseen():
        return generator.get_state().numpy().tobytes()
