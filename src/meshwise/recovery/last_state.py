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
    """Tells how many ranks hold the same parameters as this rank, so that these ranks can share the work of writing.

    own: the number of this rank among them, from 0.
    same: how many ranks hold the same parameters, including this rank.
    divided: whether the optimizer state is sharded over these ranks.
    whole: whether every rank holds the whole state. A single rank can then write all of it.
    """

    world: int
    attempt: int
    own: int = 0
    same: int = 1
    divided: bool = False
    whole: bool = False


@dataclass
class _Laid:
    """The layout of this rank's part of the state in the memory-mapped file, and the dicts of the program with the
    tensors.

    key: a text that differs if the layout differs.
    found: for each tensor, the dict in which the program holds it, and its key there, e.g. (the parameters of a module,
        "weight"). A later step may put a new tensor there. Empty if any tensor is in no known dict.
    divided: whether some tensors are DTensors, of which this rank holds a shard.
    shapes: the shape of this rank's part of each tensor.
    changing: the indices of the model's buffers among the tensors. A forward pass may change buffers.
    copies: for each index in `changing`, memory for a copy of the buffer.
    kept: what this rank writes, as (index of a tensor, box). A box is a range of indices in each dimension. The box
        None stands for all that this rank holds of the tensor.
    """

    key: str
    found: list[tuple[dict[Any, Any], Any]]
    divided: bool
    shapes: list[torch.Size]
    changing: list[int]
    copies: list[Tensor]
    kept: list[tuple[int, Box | None]]


class LastState:
    """Keeps track of this rank's part of the training state after the newest step, and writes it to a memory-mapped
    file. The file outlives the process, so a run can resume from it after a crash."""

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
        """The number of the step after which `note` was called last. It is -1 before the first call."""

    @property
    def size(self) -> int:
        """The number of bytes of tensors that `write` writes."""
        return self._memory.size

    @property
    def found_again(self) -> bool:
        """Whether the state's tensors can be looked up after each step in dicts of the model and the optimizer, which
        is fast. If False, the whole state is collected again after each step."""
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
        """Return whether the state after the last complete step can still be written.

        The result is False while a step changes the state, and after a tensor of the state was overwritten. Buffers of
        the model may change, because `note` has copied them.
        """
        changing = set() if self._laid is None else set(self._laid.changing)
        now = enumerate(zip(versions(self._locals), self._versions, strict=True))
        same = all(number in changing or is_now == before for number, (is_now, before) in now)
        return self._state.whole and self.noted == self._state.step >= 0 and same

    @torch.no_grad()
    def write(self) -> None:
        """Write the state as it was in the last call of `note` to the memory-mapped file. Does nothing if the file has
        this state already. Raises OSError if there is no space for it."""
        laid = self._laid
        if laid is None or self._memory.step == self.noted:
            return
        copies = dict(zip(laid.changing, laid.copies, strict=True))
        sources = [copies.get(number, _source(self._objects[number], box)) for number, box in laid.kept]
        values = self._now if "all" in self._now else encoded(self._now)[0]
        facts = {"facts": {**self._facts, **self._where}, "values": values}
        self._memory.write(self.noted, json.dumps(facts, separators=(",", ":")).encode(), sources)

    def leave(self) -> bool:
        """After a failed step, write the state from before this step to the memory-mapped file. Return whether this
        succeeded.

        If the failed step has begun to change the state, nothing is written. If the state changes during the write, the
        written state is marked as invalid. The result is False in these cases.
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
        """Collect the current state, and return the layout of its tensors in the memory-mapped file. The previous
        layout is kept if it still fits. Raises UsageError if a DTensor has a Partial placement.
        """
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
        """Return the boxes of tensors that this rank writes. A tensor that several ranks hold is written by a single
        rank. These ranks write about equally many bytes.
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
        """Return, for each tensor of the state, the dict in which the program holds it, and its key there, e.g. (the
        parameters of a module, "weight"). After a later step, the caller finds the current tensors in these dicts.

        Returns an empty list if any part of the state cannot be looked up in this way.
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
        """Take the current tensors of the state from the dicts in `laid.found`, because a step may have replaced
        tensors. Return False if `laid` does not fit anymore, e.g. because a tensor is missing or has another shape."""
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
        """Replace the tensors of the state by `found`, in the same order. Returns False, and changes nothing, if a
        tensor is missing or a shape differs from `laid.shapes`."""
        if any(tensor is None for tensor in found) or [t.shape for t in locals_of(found)] != laid.shapes:
            return False
        self._objects = found
        return True

    def _count(self) -> tuple[int, int]:
        state = self._state.optimizer.state
        return len(state), sum(map(len, state.values()))

    def _changed(self) -> dict[str, Any]:
        """Return the values of the state that are not tensors and may change in a step, such as learning rates."""
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
    """Return the values of an encoded dict. `encoded` leaves a dict with text keys as it is, and turns other dicts into
    one entry such as `{"$dict": [[key, value], ...]}`."""
    word = next(iter(values), "")
    return [value for _, value in values[word]] if word.startswith("$") else list(values.values())


def _source(tensor: Tensor, box: Box | None) -> Tensor:
    return local_of(tensor).detach() if box is None else view_of(tensor, box)
