"""Keep a rank's state in memory that outlives its process.

The memory holds the state after a step, in two places in turn (records/left_parts.py).

Tested in tests/recovery/test_last_state.py.
"""

from __future__ import annotations

import json
import mmap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from meshwise.compat.copying import copy_all
from meshwise.records.boxes import volume
from meshwise.records.left_parts import HEAD, PLACE, PLACES
from meshwise.recovery.layout import Held, WriteItem
from meshwise.recovery.side_copies import SideCopies
from meshwise.recovery.tensor_files import laid_out

PAGE, ROOM = 4096, 1 << 16  # bytes: what begins at a multiple of it; of the facts of a step


class LeftMemory:
    """A memory-mapped file that holds the state of one rank and outlives its process. It takes up no space before the
    first write."""

    def __init__(self, path: Path, attempt: int, side: SideCopies | None) -> None:
        """path: an existing file, which is mapped into memory.
        attempt: the number of the attempt. It is written with every state.
        side: copies the tensors from an accelerator to the file. It is None on a CPU, where torch copies them directly.
        """
        self._path, self._attempt, self._side = path, attempt, side
        self._memory: mmap.mmap | None = None
        self._text = self._beginning = b""
        self._parts: list[tuple[WriteItem, int, torch.dtype]] = []
        self._starts: list[int] = []
        self._into: list[list[Tensor]] = []
        self._place = 0
        self.size = 0
        """The bytes of all tensors in one state. The file has room for the tensors of two states."""
        self.step = -1
        """The step of the newest state that was written, or -1 if there is no valid state."""

    def lay_out(
        self, parts: Sequence[WriteItem], shapes: Mapping[str, Held], facts: Mapping[str, Any]
    ) -> list[WriteItem]:
        """Discard the contents of the file, and prepare it for these parts.

        Returns the parts in the order that `write` expects.
        """
        if self._side is not None:
            self._side.finish()
        with self._path.open("r+b") as file:
            file.write(bytes(PLACES * PLACE.size))
        self._memory, self.step = None, -1
        self._beginning, places, self.size = laid_out(parts, shapes)
        self._parts = [(part, at, getattr(torch, shapes[part.name].dtype)) for part, at in places.items()]
        boxes: dict[str, list[Any]] = {name: [] for name in shapes}
        for part, at in places.items():
            boxes[part.name].append([part.box, at])
        tensors = {name: [each.dtype, each.shape, boxes[name]] for name, each in shapes.items()}
        self._text = json.dumps({**facts, "tensors": tensors}, separators=(",", ":")).encode()
        return list(places)

    def _map(self) -> mmap.mmap:
        """Map the file into memory, and return the memory.

        The file has room for the states after two steps, so that one state stays complete while the other is
        overwritten. A state consists of its facts (JSON) and its tensors. The layout, which says where a tensor lies,
        is stored once.
        """
        self._starts = starts = [HEAD]
        for size in (len(self._text), ROOM, ROOM, self.size, self.size):
            starts.append(-(-(starts[-1] + size) // PAGE) * PAGE)
        with self._path.open("r+b") as file:
            file.truncate(starts[-1])
            memory = mmap.mmap(file.fileno(), starts[-1])
        memory[HEAD : HEAD + len(self._text)] = self._text
        self._into = []
        for begin in starts[3:5]:
            memory[begin : begin + len(self._beginning)] = self._beginning
            buffer = torch.frombuffer(memory, dtype=torch.uint8, offset=begin, count=self.size)
            self._into.append([_view(buffer, *each) for each in self._parts])
        if self._side is not None:
            self._side.pin(torch.frombuffer(memory, dtype=torch.uint8))
        return memory

    def write(self, step: int, facts: bytes, sources: Sequence[Tensor]) -> None:
        """Write the state after a step to the file. The file holds two states, and the older of them is overwritten.

        Raises OSError if the memory has no space, or if the facts take more than ROOM bytes.

        facts: the values of the state that are not tensors, as JSON.
        sources: the tensors of the state, in the order that `lay_out` returned.
        """
        if len(facts) > ROOM:
            raise OSError(f"the values beside tensors take {len(facts)} bytes as JSON, but at most {ROOM} bytes fit")
        memory = self._memory = self._memory or self._map()
        place = 1 - self._place
        at, words = self._starts[1 + place], (self._attempt, HEAD, len(self._text))
        self._publish(place, 0)
        memory[at : at + len(facts)] = facts
        PLACE.pack_into(memory, place * PLACE.size, 0, *words, at, len(facts), self._starts[3 + place], self.size)
        if self._side is None:
            copy_all(self._into[place], sources)
            self._publish(place, step + 1)
        else:
            self._side.copy(self._into[place], sources, lambda: self._publish(place, step + 1))
        self._place, self.step = place, step

    def withdraw(self) -> None:
        """Make the newest state in the file invalid, so that no reader of the file uses it."""
        if self._side is not None:
            self._side.finish()
        self._publish(self._place, 0)
        self.step = -1

    def _publish(self, place: int, number: int) -> None:
        """Write a step's number into the head of the file. By this number, readers see whether a state is valid.

        place: which of the file's two states the number belongs to, 0 or 1.
        number: the step plus 1, or 0 if this state is not valid.
        """
        if self._memory is not None:
            self._memory[place * PLACE.size : place * PLACE.size + 8] = number.to_bytes(8, "little")


def _view(buffer: Tensor, part: WriteItem, at: int, dtype: torch.dtype) -> Tensor:
    """Return the bytes of a part, which begin at byte `at` of `buffer`, as a tensor with the part's shape and dtype."""
    shape = [end - begin for begin, end in part.box]
    return buffer[at : at + volume(part.box) * dtype.itemsize].view(dtype).view(shape)
