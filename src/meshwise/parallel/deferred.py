"""Deferred construction: a model too large for one device is built on fake tensors, then filled in shard by shard.

The constructor runs once, with shapes and no values, and its operators are recorded; so are those that come later, such
as `model.half()`. Once the plan has divided the parameters, each rank replays the record from rank 0's random numbers
and keeps its part of each tensor: bitwise what one device would hold. It never holds more than its parts and about one
whole parameter, and nothing is sent.

A constructor that looks at a value (`.item()`) gets it: what the value depends on is replayed then and there.
"""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from meshwise.compat import fake
from meshwise.compat.dispatch import without_interception
from meshwise.compat.heap import trim_heap
from meshwise.compat.sharding import with_local
from meshwise.compat.tree import map_tensors, tensors_in
from meshwise.parallel.record import Record, record_of
from meshwise.parallel.replay import Place, Unlike, replay
from meshwise.spec.errors import PlanError, UsageError
from meshwise.transfer import collectives
from meshwise.transfer.sharded import local_slices

LARGE = 8 << 20  # bytes: holes of this size in the heap would add up to a good part of a large model


@contextlib.contextmanager
def deferred() -> Iterator[None]:
    """Models built inside have shapes and no values yet: `with mw.deferred(): model = Net()`.

    `mw.distribute` (or a Job's plan) then gives each rank its part, with the values of a plain construction. Draw no
    random numbers between the two: they would not be those of a plain run.
    """
    record = Record()
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
            model = make()
            for t in _tensors(model).values():
                if fake.is_fake(t):
                    record_of(t).known(t)
            return model, ""
    except UsageError as error:
        torch.set_rng_state(state)
        reason = str(error.__cause__ or error).splitlines()[0]
        return make(), f"the model was built whole on every rank: its constructor needs values ({reason})"


@dataclass(frozen=True)
class Held:
    """A deferred model whose tensors are on the meta device for now, and what they will be.

    tensors: by (name of the module, name in it); attributes: those that are neither parameter nor buffer.
    """

    record: Record
    tensors: dict[tuple[str, str], Place]
    attributes: dict[tuple[str, str], Any]
    own: dict[tuple[str, str], dict[str, Any]] = field(default_factory=dict)


def hold(model: nn.Module) -> Held | None:
    """Put meta tensors in the place of the fake ones of a deferred `model`; None where it has none."""
    fakes = {key: t for key, t in _tensors(model).items() if fake.is_fake(t)}
    if not fakes:
        return None
    records = {record_of(t) for t in fakes.values()}
    if len(records) > 1:
        raise UsageError("the models were built in several mw.deferred blocks. Build them in one.")
    record = records.pop()
    held = Held(record, {}, {})
    metas: dict[int, Tensor] = {}
    for key, t in fakes.items():
        held.tensors[key] = record.known(t)
        held.own[key] = fake.own_attributes(t)
        if id(t) not in metas:
            with without_interception():
                meta = torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="meta")
            metas[id(t)] = nn.Parameter(meta, t.requires_grad) if isinstance(t, nn.Parameter) else meta
        _put(model, key, metas[id(t)], held.own[key])
    for name, module in model.named_modules():
        for attribute, value in vars(module).items():
            if isinstance(value, Tensor | list | tuple | dict) and attribute[:1] != "_":
                places = [record.known(t) for t in tensors_in(value) if fake.is_fake(t)]
                if places:
                    held.attributes[name, attribute] = value
    return held


def materialise(model: nn.Module, device: torch.device | str = "cpu") -> None:
    """Give the tensors of a deferred model their values, whole, on `device`; any other model stays as it is."""
    held = hold(model)
    if held is not None:
        fill(held, model, device)


def fill(held: Held, model: nn.Module, device: torch.device | str, *, parts: torch.device | str = "") -> None:
    """Replay the record of a deferred `model`, and put this rank's part of each tensor in its place on `device`.

    Where a parameter was divided meanwhile, each rank keeps its part, as soon as the parameter is known. Collective:
    all ranks start from rank 0's random numbers, and must have built the same. parts: where the parts of what was
    divided lie, if not on `device`.
    """
    record = held.record
    _agree(record)
    attributes: dict[int, Tensor] = {}
    wanted: dict[int, list[tuple[Place, Tensor | tuple[str, str]]]] = {}
    for key, place in held.tensors.items():
        wanted.setdefault(place.storage, []).append((place, key))
    for value in held.attributes.values():
        for t in tensors_in(value):
            if fake.is_fake(t):
                place = record.known(t)
                wanted.setdefault(place.storage, []).append((place, t))
    now, new = _tensors(model), dict[int, Tensor]()

    def put(key: tuple[str, str], make: Callable[[Tensor, torch.device | str], Tensor]) -> None:
        old = now[key]
        if id(old) not in new:
            value = make(old, parts or device if isinstance(old, DTensor) else device)
            new[id(old)] = nn.Parameter(value, old.requires_grad) if isinstance(old, nn.Parameter) else value
        _put(model, key, new[id(old)], held.own[key])

    def finished(number: int, storage: torch.UntypedStorage) -> None:
        if storage.nbytes() >= LARGE:
            trim_heap()
        made: dict[Place, Tensor] = {}
        for place, to in wanted[number]:
            whole = made.setdefault(place, place.of(storage))
            if isinstance(to, Tensor):
                attributes[id(to)] = whole
            else:
                put(to, functools.partial(_part, whole))

    record.check_given()
    for number in [number for number in wanted if number in record.given]:
        for _, to in wanted.pop(number):
            if isinstance(to, Tensor):
                raise UsageError(f"{to.shape}: a tensor beside the parameters shares memory with one that was loaded.")
            put(to, record.given[number])
    if wanted:
        end = record.put_back()
        replay(record.entries, wanted, finished)
        end()
    else:  # all was loaded: nothing is drawn, on any number of devices
        torch.default_generator.set_state(record.start)
    for (name, attribute), value in held.attributes.items():
        setattr(model.get_submodule(name), attribute, map_tensors(lambda t: attributes.get(id(t), t), value))


def _agree(record: Record) -> None:
    """All ranks start from rank 0's random numbers; raises PlanError when they have not built the same."""
    if collectives.world_size() > 1:
        start, digest = collectives.broadcast_object((record.start, record.digest()))
        if not all(collectives.gather_objects(digest == record.digest())):
            raise PlanError(
                "the model's constructor did not do the same on every rank. Seed what it draws outside of torch "
                "(random, numpy) with the same number on every rank."
            )
        record.start = start


def _part(whole: Tensor, like: Tensor, device: torch.device | str) -> Tensor:
    """`whole` in the dtype of `like`, on `device`; where that is divided, this rank's part, of its own memory."""
    whole = whole.to(like.dtype)
    if not isinstance(like, DTensor):
        return whole.to(device)
    return with_local(like, whole[local_slices(like)].clone(memory_format=torch.contiguous_format).to(device))


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
