"""Write this rank's latest state where it outlives the rank.

The memory is described in records/left_parts.py.

    note     after each step: remember which tensors are the state, and copy those that a forward pass changes
    write    copy the state into the memory. This needs no collective call, so it also works after a step has failed,
             as long as the optimizer has not changed the state since the last step

The layout of the memory is computed once. If every tensor of the state can be found again under the same name in the
model's modules and in the optimizer's state, each step only looks up these names. Otherwise the state is collected
again after each step.

Tested in tests/recovery/test_last_state.py.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import is_
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from meshwise.compat.copying import copy_all
from meshwise.compat.modules import buffers_in, parameters_in
from meshwise.compat.reducer import versions
from meshwise.compat.sharding import division, local_of, locals_of
from meshwise.compat.tree import tensors_in
from meshwise.records.boxes import Box, volume
from meshwise.recovery.layout import Held, WriteItem, held, itemsize, view_of
from meshwise.recovery.left_memory import LeftMemory
from meshwise.recovery.side_copies import SideCopies
from meshwise.recovery.state import RunState, tree_of
from meshwise.recovery.values import encoded
from meshwise.spec.devices import has_streams
from meshwise.spec.errors import UsageError

PAGE, ROOM = 4096, 1 << 16  # bytes: what begins at a multiple of it; of the facts of a step


@dataclass(frozen=True)
class Among:
    """Which ranks hold the same part of the state as this rank, so that they can share the work of writing it.

    same: the number of ranks that hold the same parameters as this rank. This rank is number `own` of them.
    divided: whether the optimizer state is sharded over these ranks, although they hold the same parameters.
    whole: whether each rank holds the whole state, so that a single rank can write all of it.
    """

    world: int
    attempt: int
    own: int = 0
    same: int = 1
    divided: bool = False
    whole: bool = False


@dataclass
class _Laid:
    """How this rank's part of the state is laid out in the file that outlives the process.

    key: text that is equal for equal layouts.
    found: the dict and key under which each tensor is found again after a step. [] if this is unknown.
    divided: whether some tensors are DTensors, so that this rank holds only a shard of them.
    changing: the numbers of the tensors that a forward pass changes.
    copies: copies of the `changing` tensors.
    kept: what this rank writes, as (number of a tensor, box). The box is None if this rank holds only one part of it.
    """

    key: str
    found: list[tuple[dict[Any, Any], Any]]
    divided: bool
    shapes: list[torch.Size]
    changing: list[int]
    copies: list[Tensor]
    kept: list[tuple[int, Box | None]]


class LastState:
    """This rank's part of the state after the last step."""

    def __init__(self, path: Path, state: RunState, among: Among, facts: Mapping[str, Any]) -> None:
        """path: the file that is mapped into memory. facts: facts about the run for the manifest of a checkpoint."""
        first = next(iter(state.model.parameters()), None)
        side = SideCopies(first.device) if first is not None and has_streams(first.device) else None
        self._memory, self._side = LeftMemory(path, among.attempt, side), side
        self._state, self._among, self._facts = state, among, facts
        self._modules = list(state.model.modules())
        self._laid: _Laid | None = None
        self._objects: list[Tensor] = []
        self._locals: list[Tensor] = []  # this rank's part of each
        self._versions: list[int] = []
        self._now: dict[str, Any] = {}
        self._where: dict[str, int] = {}
        self._of_optimizer = (0, 0)
        self.noted = -1
        """The step after which `note` was called last, or -1."""

    @property
    def size(self) -> int:
        """The number of bytes of tensors that `write` writes."""
        return self._memory.size

    @property
    def found_again(self) -> bool:
        """Whether all tensors can be looked up in known dicts, so that `note` is cheap."""
        return self._laid is not None and bool(self._laid.found)

    @torch.no_grad()
    def note(self) -> None:
        """Remember which tensors and values are the state after this step, so that `write` can write them."""
        laid = self._laid
        if laid is None or not laid.found or not self._look(laid):
            laid = self._lay_out()
        if laid.copies:
            copy_all(laid.copies, [self._locals[number] for number in laid.changing])
        self._versions = versions(self._locals)
        state = self._state
        self._where = {"epoch": state.epoch, "index": state.index, "seed": state.seed, "step": state.step}
        self.noted = self._state.step

    def is_whole(self) -> bool:
        """Return whether the state is still the state after the noted step.

        Tensors that `note` copied may have changed.
        """
        changing = set() if self._laid is None else set(self._laid.changing)
        now = enumerate(zip(versions(self._locals), self._versions, strict=True))
        same = all(number in changing or is_now == before for number, (is_now, before) in now)
        return self._state.whole and self.noted == self._state.step >= 0 and same

    @torch.no_grad()
    def write(self) -> None:
        """Write the noted state into the memory that outlives the process, unless the state is there already.

        Raises OSError if there is no space for it.
        """
        laid = self._laid
        if laid is None or self._memory.step == self.noted:
            return
        copies = dict(zip(laid.changing, laid.copies, strict=True))
        sources = [copies.get(number, _source(self._objects[number], box)) for number, box in laid.kept]
        values = self._now if "all" in self._now else encoded(self._now)[0]
        facts = {"facts": {**self._facts, **self._where}, "values": values}
        self._memory.write(self.noted, json.dumps(facts, separators=(",", ":")).encode(), sources)

    def leave(self) -> bool:
        """Write the noted state after a step has failed, if it is unchanged. Returns whether it was written.

        If the state changes while it is written, the memory is marked as invalid, and the result is False.
        """
        if not self.is_whole():
            return False
        self.write()
        if self.is_whole():  # and was so all the time
            return True
        self._memory.withdraw()
        return False

    def settle(self) -> None:
        """Make the current stream wait until the tensors are copied. Call this before the optimizer changes them."""
        if self._side is not None:
            self._side.hold_back()

    # Laying out.

    def _lay_out(self) -> _Laid:
        """Collect the state, and compute a new layout if the shapes or places of the tensors have changed."""
        values, tensors = encoded(tree_of(self._state))
        partial = [
            name
            for name, t in tensors.items()
            for p in getattr(t, "placements", ())
            if division(p) is None and not p.is_replicate()
        ]
        if partial:
            raise UsageError(f"{partial[0]} is a DTensor with a Partial placement. Use Shard or Replicate.")
        self._objects, self._locals = list(tensors.values()), locals_of(tensors.values())
        self._of_optimizer = self._count()
        shapes = {name: held(tensor) for name, tensor in tensors.items()}
        found = self._find(values, self._objects)
        key = repr((list(shapes.items()), bool(found), self._of_optimizer, len(self._state.optimizer.param_groups)))
        if self._laid is None or self._laid.key != key:
            self._laid = self._laid_out(key, found, values, shapes)
        self._laid.found = found
        self._now = self._changed() if found else {"all": values}
        return self._laid

    def _laid_out(self, key: str, found: list[Any], values: Any, shapes: dict[str, Held]) -> _Laid:
        objects = self._locals
        buffers = {id(local_of(buffer)) for buffer in self._state.model.buffers()}
        changing = [number for number, tensor in enumerate(objects) if id(tensor) in buffers]
        parts = self._dealt(shapes)
        facts = {"world": self._among.world, "whole": self._among.whole, "values": values}
        order = self._memory.lay_out(parts, shapes, facts)
        numbers = {name: (number, len(shapes[name].boxes) > 1) for number, name in enumerate(shapes)}
        return _Laid(
            key,
            found,
            any(local is not tensor for local, tensor in zip(objects, self._objects, strict=True)),
            [tensor.shape for tensor in objects],
            changing,
            [torch.empty_like(objects[number]) for number in changing],
            [(numbers[part.name][0], part.box if numbers[part.name][1] else None) for part in order],
        )

    def _dealt(self, shapes: Mapping[str, Held]) -> list[WriteItem]:
        """Return what this rank writes.

        Tensors that several ranks hold are divided among these ranks, about equally by bytes.
        """
        same, loads, mine = self._among.same, [0] * self._among.same, list[WriteItem]()
        every = [(name, box) for name, each in shapes.items() for box in each.boxes if volume(box)]
        for name, box in sorted(every, key=lambda each: -volume(each[1]) * itemsize(shapes[each[0]].dtype)):
            if same == 1 or (self._among.divided and name.startswith("optimizer/")):
                mine.append(WriteItem(name, box, box))
                continue  # of others unknown: what is shared is dealt alike on all
            least = loads.index(min(loads))
            loads[least] += volume(box) * itemsize(shapes[name].dtype)
            if least == self._among.own:
                mine.append(WriteItem(name, box, box))
        return mine

    def _find(self, values: Any, objects: Sequence[Tensor]) -> list[tuple[dict[Any, Any], Any]]:
        """Return the (dict, key) under which each tensor is found again after a step.

        Returns [] if this is unknown for one tensor, or if other values of the state may change from step to step.
        """
        optimizer, places = self._state.optimizer, dict[int, tuple[dict[Any, Any], Any]]()
        for module in self._modules:
            for owner in (parameters_in(module), buffers_in(module)):
                places.update({id(tensor): (owner, name) for name, tensor in owner.items() if tensor is not None})
        for entry in optimizer.state.values():
            if isinstance(entry, dict):
                places.update({id(tensor): (entry, name) for name, tensor in entry.items()})
        plain = all(
            isinstance(entry, dict) and all(value is None or isinstance(value, Tensor) for value in entry.values())
            for entry in optimizer.state.values()
        )
        usual = isinstance(values.get("optimizer"), dict) and set(values["optimizer"]) == {"state", "param_groups"}
        of_model = all(isinstance(value, dict) and "$tensor" in value for value in _entries(values["model"]))
        in_order = usual and plain and of_model and all(id(tensor) in places for tensor in objects)
        if not in_order or next(tensors_in(self._changed()), None) is not None:
            return []
        return [places[id(tensor)] for tensor in objects]

    # Noting.

    def _look(self, laid: _Laid) -> bool:
        """Look up the tensors in their dicts. Returns False if the tensors no longer fit the layout."""
        held = self._state.optimizer.state
        if self._of_optimizer != (len(held), sum(map(len, held.values()))):
            return False
        found = []
        try:
            for owner, name in laid.found:
                found.append(owner[name])
        except KeyError:
            return False
        if not all(map(is_, found, self._objects)) and not self._take(found, laid):
            return False
        self._locals = locals_of(found) if laid.divided else found
        self._now = self._changed()
        return True

    def _take(self, found: list[Tensor], laid: _Laid) -> bool:
        """Use the tensors in `found` from now on, in place of the tensors that had these names before. Returns False,
        and changes nothing, if a shape has changed.
        """
        if any(tensor is None for tensor in found) or [t.shape for t in locals_of(found)] != laid.shapes:
            return False
        self._objects = found
        return True

    def _count(self) -> tuple[int, int]:
        state = self._state.optimizer.state
        return len(state), sum(map(len, state.values()))

    def _changed(self) -> dict[str, Any]:
        """Return the plain values of the state that change with each step."""
        state, groups = self._state, list[dict[str, Any]]()
        for group in state.optimizer.param_groups:
            groups.append(group.copy())
            del groups[-1]["params"]
        return {
            "groups": groups,
            "scheduler": state.scheduler.state_dict() if state.scheduler else None,
            "scaler": state.scaler.state_dict(),
            "seed": state.seed,
            "epoch": state.epoch,
            "index": state.index,
            "step": state.step,
        }


def _entries(values: Mapping[str, Any]) -> list[Any]:
    """Return the values of a dict that `encoded` has converted."""
    word = next(iter(values), "")
    return [value for _, value in values[word]] if word.startswith("$") else list(values.values())


def _source(tensor: Tensor, box: Box | None) -> Tensor:
    return local_of(tensor).detach() if box is None else view_of(tensor, box)
