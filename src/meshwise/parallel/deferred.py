"""Build a large model on fake tensors, then fill its shards.

This is deferred construction, for a model that is too large for one device.

The constructor runs once, with shapes and no values, and its operators are recorded. Later operators on the model, such
as `model.half()`, are recorded too. Once the plan has divided the parameters, each rank replays the record with the
random numbers of rank 0 and keeps its part of each tensor, bitwise equal to the values on one device. A rank never
holds more than its parts and about one whole parameter, and no values are sent.

A constructor that reads a value (`.item()`) gets it: the operators that lead to the value are replayed at once.
"""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from meshwise.parallel.op_record import OpRecord, record_of
from meshwise.parallel.op_replay import ReplayMismatch, StorageView, replay
from meshwise.spec.errors import PlanError, UsageError
from meshwise.torch_compat import fake
from meshwise.torch_compat.dispatch import is_fake, rehearsing, without_interception
from meshwise.torch_compat.driver import trim_heap
from meshwise.torch_compat.sharding import with_local
from meshwise.torch_compat.tree import map_tensors, tensors_in
from meshwise.transfer import collectives, stages
from meshwise.transfer.sharded import local_part

LARGE = 8 << 20  # bytes: after filling a storage this large, return freed memory to the system, or it would pile up


@contextlib.contextmanager
def deferred() -> Iterator[None]:
    """Build models with shapes but no values yet: `with mw.deferred(): model = Net()`.

    `mw.distribute` (or a Job's plan) then gives each rank its part, with the values of a plain construction. Draw no
    random numbers between the `with` block and `mw.distribute`, because they would differ from those of a plain run.
    """
    record = OpRecord()
    with warnings.catch_warnings(), record.mode:
        warnings.filterwarnings("ignore", "Accessing the data pointer of FakeTensor")  # copy.deepcopy causes this
        try:
            yield
        except (RuntimeError, ReplayMismatch, UsageError) as error:
            record.undraw()
            if isinstance(error, torch.OutOfMemoryError | UsageError):
                raise
            raise UsageError(
                "mw.deferred runs a constructor without values, but this constructor needs values: "
                f"{str(error).splitlines()[0]} Build the model outside of mw.deferred, or compute the value without "
                "torch, for example with numpy or math."
            ) from error
    record.leave()


def constructed(make: Callable[[], nn.Module]) -> tuple[nn.Module, str]:
    """Build a model by calling `make` inside `deferred()`. If this fails, build it without `deferred()`.

    Returns the model and a note that says why the model could not be deferred. The note is empty if the model was
    deferred. In a rehearsal, models are never deferred, and the note is empty.
    """
    if rehearsing():
        return make(), ""
    try:
        with deferred():
            model = make()
            for t in _tensors(model).values():
                if is_fake(t):
                    record_of(t).known(t)
            return model, ""
    except UsageError as error:
        reason = str(error.__cause__ or error).splitlines()[0]
        return make(), f"every rank built the whole model, because its constructor needs values ({reason})"


def materialise(model: nn.Module, device: torch.device | str = "cpu") -> None:
    """Give all tensors of a model that was built in `deferred` their values, on `device`. Each tensor is filled whole,
    even if there are several ranks. Models with values stay unchanged."""
    fill = take_fakes(model)
    if fill is not None:
        fill(device, device)


def take_fakes(model: nn.Module) -> Callable[[torch.device | str, torch.device | str], None] | None:
    """Replace the fake tensors of `model` with meta tensors. Return a function that gives the model its values, or None
    if it had no fake tensors."""
    fakes = {key: t for key, t in _tensors(model).items() if is_fake(t)}
    if not fakes:
        return None
    records = {record_of(t) for t in fakes.values()}
    if len(records) > 1:
        raise UsageError("the models were built in several mw.deferred blocks. Build all models in one block.")
    return _Skeleton(model, fakes, records.pop()).fill


@dataclass(frozen=True)
class _Slot:
    """A parameter or buffer of a deferred model, which gets its values later."""

    module: str
    name: str
    view: StorageView
    attributes: dict[str, Any]

    def put(self, model: nn.Module, tensor: Tensor) -> None:
        module = model.get_submodule(self.module)
        for name, value in self.attributes.items():
            setattr(tensor, name, value)
        if isinstance(tensor, nn.Parameter):
            module.register_parameter(self.name, tensor)
        else:
            setattr(module, self.name, tensor)


class _Skeleton:
    """A deferred model, that is, a model that was constructed without values. Its parameters and buffers are on the
    meta device until `fill` computes their values."""

    def __init__(self, model: nn.Module, fakes: dict[tuple[str, str], Tensor], record: OpRecord) -> None:
        self.model, self.record = model, record
        self.slots: list[_Slot] = []
        metas: dict[int, Tensor] = {}
        for key, t in fakes.items():
            self.slots.append(_Slot(*key, record.known(t), fake.own_attributes(t)))
            if id(t) not in metas:
                with without_interception():
                    meta = torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="meta")
                metas[id(t)] = _like(t, meta)
            self.slots[-1].put(model, metas[id(t)])
        self.attributes = {
            (name, attribute): value
            for name, module in model.named_modules()
            for attribute, value in vars(module).items()
            if isinstance(value, Tensor | list | tuple | dict) and attribute[:1] != "_" and self._views_in(value)
        }

    def _views_in(self, value: Any) -> list[tuple[Tensor, StorageView]]:
        return [(t, self.record.known(t)) for t in tensors_in(value) if is_fake(t)]

    def fill(self, device: torch.device | str, parts: torch.device | str) -> None:
        """Compute the values of a deferred model by replaying the operators that its constructor has recorded."""
        record, filling = self.record, _Filling(self.model, device, parts)
        _agree(record)
        for slot in self.slots:
            filling.slots.setdefault(slot.view.storage, []).append(slot)
        for value in self.attributes.values():
            for t, view in self._views_in(value):
                filling.others.setdefault(view.storage, []).append((t, view))
        record.check_loaded()
        filling.fill_absent()
        for number in record.loaded.keys() & filling.slots.keys():
            for slot in filling.slots.pop(number):
                filling.put(slot, record.loaded[number])
        for number in record.loaded.keys() & filling.others.keys():
            t, _ = filling.others[number][0]
            raise UsageError(
                f"mw.deferred cannot fill a tensor of shape {tuple(t.shape)}: it shares memory with a loaded weight, "
                "but is no parameter or buffer. Build the model outside of mw.deferred."
            )
        wanted = filling.slots.keys() | filling.others.keys()
        if wanted:
            end = record.rewind()
            replay(record.entries, wanted, filling.finished)
            end()
        else:  # all values were loaded: undo the recorded random draws
            record.undraw()
        for (name, attribute), value in self.attributes.items():
            known = map_tensors(lambda t: filling.values.get(id(t), t), value)
            setattr(self.model.get_submodule(name), attribute, known)


class _Filling:
    """The tensors of a deferred model that get their values while the recorded constructor is replayed."""

    def __init__(self, model: nn.Module, device: torch.device | str, parts: torch.device | str) -> None:
        self.slots: dict[int, list[_Slot]] = {}
        self.others: dict[int, list[tuple[Tensor, StorageView]]] = {}
        self.values: dict[int, Tensor] = {}
        """The values of the tensors that are neither parameters nor buffers, by the id of the fake tensor."""
        self._model, self._device, self._parts = model, device, parts
        self._metas, self._made = _tensors(model), dict[int, Tensor]()
        self._absent = {id(p) for p in stages.absent_parameters(model)}

    def put(self, slot: _Slot, make: Callable[[Tensor, torch.device | str], Tensor]) -> None:
        """Replace a parameter or buffer of the model with the tensor that `make(meta tensor, device)` returns."""
        meta = self._metas[slot.module, slot.name]
        if id(meta) not in self._made:
            self._made[id(meta)] = _like(meta, make(meta, self._parts if isinstance(meta, DTensor) else self._device))
        slot.put(self._model, self._made[id(meta)])

    def fill_absent(self) -> None:
        """Replace parameters used only by other pipeline stages with NaN tensors that take no memory."""
        for number, slots in list(self.slots.items()):
            if all(id(self._metas[slot.module, slot.name]) in self._absent for slot in slots):
                for slot in self.slots.pop(number):
                    self.put(slot, _nothing)

    def finished(self, number: int, storage: torch.UntypedStorage) -> None:
        """Set all parameters, buffers and other tensors whose values are in this storage."""
        if storage.nbytes() >= LARGE:
            trim_heap()
        whole = functools.cache(lambda view: view.of(storage))  # cached, so that shared tensors stay shared
        for slot in self.slots.get(number, ()):
            self.put(slot, functools.partial(_part, whole(slot.view)))
        for t, view in self.others.get(number, ()):
            self.values[id(t)] = whole(view)


def _like(t: Tensor, value: Tensor) -> Tensor:
    return nn.Parameter(value, t.requires_grad) if isinstance(t, nn.Parameter) else value


def _agree(record: OpRecord) -> None:
    """Raise PlanError if the ranks have recorded different operators of the constructor. Make replays on all ranks draw
    the random numbers of rank 0. Collective."""
    everyone = collectives.everyone()
    if collectives.world_size(everyone) > 1:
        of_rank_0, digest = collectives.broadcast_object((record.drawn_from(), record.digest()), everyone)
        if not all(collectives.gather_objects(digest == record.digest(), everyone)):
            raise PlanError(
                "the model's constructor did not run the same operators on all ranks. If it draws numbers outside "
                "of torch (random, numpy), seed these generators with the same number on every rank."
            )
        record.draw_from(*of_rank_0)


def _part(whole: Tensor, like: Tensor, device: torch.device | str) -> Tensor:
    """Return `whole`, or this rank's part of it if `like` is a DTensor, in the dtype of `like` on `device`."""
    whole = whole.to(like.dtype)
    if not isinstance(like, DTensor):
        return whole.to(device)
    return with_local(like, local_part(like, whole.__getitem__).clone(memory_format=torch.contiguous_format).to(device))


def _nothing(like: Tensor, device: torch.device | str) -> Tensor:
    """Return NaN in the shape of a parameter that only another pipeline stage uses."""
    return torch.full((), torch.nan, dtype=like.dtype, device=device).expand(like.shape)


def _tensors(model: nn.Module) -> dict[tuple[str, str], Tensor]:
    """Return all parameters and buffers by (module name, name in the module)."""
    found: dict[tuple[str, str], Tensor] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        found |= {(name, own): p for own, p in module.named_parameters(recurse=False, remove_duplicate=False)}
        found |= {(name, own): b for own, b in module.named_buffers(recurse=False, remove_duplicate=False)}
    return found
