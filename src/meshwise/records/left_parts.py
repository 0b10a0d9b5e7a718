"""Read state that ranks left in memory, and commit a checkpoint.

That memory outlives the rank's process. This module does not import torch. The memory has:

    places     64 bytes each: the step plus 1, the attempt, and position and length of each of the three parts below
    layout     JSON: which boxes of which tensors lie where in the file of tensors; the plain values
    facts      JSON: the facts of the step, and the plain values that change from step to step
    tensors    a safetensors file, as it is written into the checkpoint

A rank writes to the two places in turn, the step's number last, so that one of them is complete at any time.
Written by recovery/last_state.py. Tested in tests/recovery/test_last_state.py.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import shutil
import struct
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from meshwise.records import checkpoints as files
from meshwise.records.boxes import cover, disjoint
from meshwise.records.checkpoints import Checkpoint, Manifest, StoredFile, StoredPiece, StoredTensor
from meshwise.records.merging import merged

HEAD, PLACES = 4096, 2
PLACE = struct.Struct("<8q")


@dataclass(frozen=True)
class LeftPart:
    """One rank's part of the state after one step, as the rank left it in a memory-mapped file. The file outlives the
    process of the rank.

    layout: describes where tensors lie in `tensors`, and has the plain values.
    facts: the facts of the step, and the plain values that change from step to step.
    tensors: the bytes of a safetensors file.
    """

    rank: int
    step: int
    attempt: int
    layout: Mapping[str, Any]
    facts: Mapping[str, Any]
    tensors: memoryview

    @property
    def values(self) -> Any:
        """The rank's part of the state without the contents of tensors: numbers, texts, lists and dicts. A tensor is
        replaced by its name."""
        changed = self.facts["values"]
        if "all" in changed:
            return changed["all"]
        values = self.layout["values"]
        groups = [a | b for a, b in zip(values["optimizer"]["param_groups"], changed["groups"], strict=True)]
        of_step = {name: value for name, value in changed.items() if name != "groups"}
        return {**values, "optimizer": {**values["optimizer"], "param_groups": groups}, **of_step}


def read_parts(path: Path, rank: int) -> Iterator[LeftPart]:
    """Yield the parts of the state that a rank has left in the memory-mapped file at `path`. There are up to two parts,
    from the last two steps that the rank saved. Yields nothing if the rank never saved a step."""
    with path.open("rb") as file:
        if file.seek(0, 2) < HEAD:
            return
        memory = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
    for place in range(PLACES):
        number, attempt, *parts = PLACE.unpack_from(memory, place * PLACE.size)
        if number > 0:
            layout, facts, tensors = (memory[at : at + size] for at, size in zip(parts[::2], parts[1::2], strict=True))
            with contextlib.suppress(ValueError):
                read = json.loads(bytes(layout)), json.loads(bytes(facts))
                yield LeftPart(rank, number - 1, attempt, *read, tensors)


def newest_whole(parts: Iterable[LeftPart], attempt: int) -> Sequence[LeftPart]:
    """Return the parts of the newest complete state of an attempt, ordered by rank. A state is complete if its parts
    contain every element of every tensor. If one part has the whole state, only this part is returned. Returns [] if no
    state is complete."""
    steps: dict[int, dict[int, LeftPart]] = {}
    for part in parts:
        if part.attempt == attempt:
            steps.setdefault(part.step, {})[part.rank] = part
    for step in sorted(steps, reverse=True):
        found = list(steps[step].values())
        whole = next((part for part in found if part.layout["whole"]), None)
        if whole is not None:
            return [whole]
        if len(found) == found[0].layout["world"] and _pieces(found) is not None:
            return sorted(found, key=lambda part: part.rank)
    return []


def _pieces(parts: Sequence[LeftPart]) -> dict[str, StoredTensor] | None:
    """Return the pieces of each tensor of a state, by the name of the tensor. A piece says where a part of the tensor
    lies in the ranks' files. No two pieces of a tensor overlap. Returns None if elements of a tensor are missing in
    `parts`."""
    places: dict[str, dict[tuple[tuple[int, int], ...], tuple[str, int]]] = {}
    kinds: dict[str, tuple[str, tuple[int, ...]]] = {}
    for part in parts:
        for name, (dtype, shape, boxes) in part.layout["tensors"].items():
            kinds[name] = dtype, tuple(shape)
            for box, at in boxes:
                key = tuple((begin, end) for begin, end in box)
                places.setdefault(name, {}).setdefault(key, (file_of(part.rank), at))
    found = {}
    for name, (dtype, shape) in kinds.items():
        boxes = disjoint(places.get(name, {}))
        if not cover(boxes, shape):
            return None
        found[name] = StoredTensor(dtype, shape, tuple(StoredPiece(*places[name][box], box) for box in boxes))
    return found


def file_of(rank: int) -> str:
    """Return the name of a rank's tensor file in a checkpoint."""
    return f"rank{rank}.safetensors"


def commit_parts(folder: Path, parts: Sequence[LeftPart]) -> Checkpoint | None:
    """Make a checkpoint in `folder` from the parts of one complete state.

    Returns None if a checkpoint at least as new already exists. Raises OSError if it cannot be written to the disk.
    """
    step, attempt = parts[0].step, parts[0].attempt
    known = files.checkpoints_in(folder)
    attempt = max([attempt, *(saved.attempt for saved in known)])
    if known and (known[-1].attempt, known[-1].step) >= (attempt, step):
        return None
    pieces = _pieces(parts)
    assert pieces is not None
    into = folder / (files.name_of(step, attempt) + files.PART)
    shutil.rmtree(into, ignore_errors=True)  # of a writer that was killed
    into.mkdir(parents=True)
    try:
        written = tuple(_written(into, part) for part in parts if part.layout["tensors"])
        facts = {"attempt": attempt, "world": parts[0].layout["world"], "time": time.time(), **parts[0].facts["facts"]}
        values = merged([part.values for part in parts])
        return Checkpoint(attempt, step, files.commit(into, Manifest(facts, values, pieces, written)))
    except OSError:
        shutil.rmtree(into, ignore_errors=True)
        raise


def _written(folder: Path, part: LeftPart) -> StoredFile:
    return files.write_file(folder / file_of(part.rank), part.tensors)
