"""Write and read a run's checkpoints; each is complete or absent.

A checkpoint is a folder.

checkpoint/step-00000040.1/    the state after step 40, saved in the first attempt
    rank0.safetensors          the pieces of tensors that rank 0 wrote
    manifest.json              where each piece belongs, the plain values, the hash of each file

It is written as `step-00000040.1.part`: first the files, then the manifest, each synced to the disk. Then the folder
gets its final name. The hash is XXH3 of 128 bits, which detects bit rot and torn writes, but not forgery.
`bench/checkpoints.py` measures the times.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import re
import shutil
import stat
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import xxhash

from meshwise.records.claims import CLAIMS, claims_of
from meshwise.spec.errors import CheckpointError

FORMAT, CHECKPOINTS, MANIFEST, PART = 2, "checkpoint", "manifest.json", ".part"
CHUNK = 4 << 20  # bytes to write in one call
_NAME = re.compile(r"step-(\d{8,})\.(\d{1,9})")
_HEAD, _MIDDLE, _TAIL = '{"hash": "', '",\n"checkpoint": ', "}\n"
Box = tuple[tuple[int, int], ...]
"""A box of a tensor: (begin, end) for each dim."""


@dataclass(frozen=True, order=True)
class Checkpoint:
    """A checkpoint of a run, as the name of its folder describes it.

    A checkpoint of a later attempt is newer, whatever its step.
    """

    attempt: int
    step: int
    path: Path

    def __str__(self) -> str:
        return f"step {self.step}" + (f" of attempt {self.attempt}" if self.attempt > 1 else "")


@dataclass(frozen=True)
class StoredFile:
    """A file of a checkpoint."""

    name: str
    size: int
    hash: str


@dataclass(frozen=True)
class StoredPiece:
    """A piece of a tensor in a file.

    at: the offset of the piece in the file, in bytes.
    box: the position of the piece in the tensor, as (begin, end) for each dim.
    """

    file: str
    at: int
    box: Box


@dataclass(frozen=True)
class StoredTensor:
    """A tensor of a checkpoint. dtype: torch's name without `torch.`, such as `float32`."""

    dtype: str
    shape: tuple[int, ...]
    pieces: tuple[StoredPiece, ...]


@dataclass(frozen=True)
class Manifest:
    """The description of a checkpoint's contents.

    facts: step, epoch, plan and other facts.
    values: the state, with names in the places of tensors.
    """

    facts: Mapping[str, Any]
    values: Any
    tensors: Mapping[str, StoredTensor]
    files: tuple[StoredFile, ...]

    @property
    def size(self) -> int:
        """The total size of the checkpoint's files, in bytes."""
        return sum(file.size for file in self.files)


def name_of(step: int, attempt: int) -> str:
    """Return the name of the folder of a checkpoint."""
    return f"step-{step:08d}.{attempt}"


def checkpoints_in(folder: Path) -> list[Checkpoint]:
    """Return the complete checkpoints in a folder, the oldest first. A checkpoint is complete once its folder has its
    final name.

    A late checkpoint is left out: an attempt wrote it after a newer attempt had begun, for example on a machine that
    the network had cut off. The claim of the newer attempt (records/claims.py) lists the checkpoints of that time.
    """
    found = []
    claims = claims_of(claims_folder(folder))
    counts = {number: facts["checkpoints"] for number, facts in claims.items() if "checkpoints" in facts}
    for path in folder.iterdir() if folder.is_dir() else ():
        named = _NAME.fullmatch(path.name)
        late = named and any(path.name not in names for n, names in counts.items() if int(named[2]) < n)
        if named and path.is_dir() and not late:
            found.append(Checkpoint(int(named[2]), int(named[1]), path))
    return sorted(found)


def claims_folder(folder: Path) -> Path:
    """Return the folder whose subfolder `attempts` has the claims (records/claims.py).

    For checkpoints of `mw.checkpoint`, this is `folder` itself. For checkpoints of a run, it is the run folder, which
    is the parent of `folder`.

    folder: a folder of checkpoints.
    """
    return folder if (folder / CLAIMS).is_dir() else folder.parent


def run_and_checkpoint(path: Path) -> tuple[Path, str | None]:
    """Return the run folder that `path` names, and the name of the checkpoint in it. Example:
    `runs/a/checkpoint/step-00000040.1` -> (`runs/a`, "step-00000040.1"). If `path` is not a checkpoint, return `path`
    and None."""
    if _NAME.fullmatch(path.name) and path.parent.name == CHECKPOINTS:
        return path.parent.parent, path.name
    return path, None


def sync_folder(folder: Path) -> None:
    """Sync the directory entries of a folder to the disk."""
    opened = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)


def write_file(path: Path, *contents: bytes | memoryview) -> StoredFile:
    """Write a file, sync it to the disk, and return its description. Raises OSError if this fails."""
    hashed, size = xxhash.xxh3_128(), 0
    with path.open("wb", buffering=0) as file:
        for each in contents:
            for begin in range(0, len(each), CHUNK):
                chunk = memoryview(each)[begin : begin + CHUNK]
                hashed.update(chunk)
                size += len(chunk)
                while len(chunk):
                    chunk = chunk[file.write(chunk) :]
        os.fsync(file.fileno())
    return StoredFile(path.name, size, hashed.hexdigest())


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write manifest.json: a line with the hash of the manifest's text, and then this text."""
    text = json.dumps({"format": FORMAT, **asdict(manifest)}, separators=(",", ":"))
    with (folder / MANIFEST).open("w", encoding="utf-8") as file:
        file.write(f"{_HEAD}{xxhash.xxh3_128_hexdigest(text.encode())}{_MIDDLE}{text}{_TAIL}")
        file.flush()
        os.fsync(file.fileno())


def read_manifest(saved: Checkpoint) -> Manifest:
    """Read the manifest of a checkpoint. Raises CheckpointError if it is missing or damaged."""
    path = saved.path / MANIFEST
    try:
        if path.exists() and not path.is_file():  # reading a pipe would never end
            raise ValueError("the path is not a regular file")
        written = path.read_text(encoding="utf-8")
        hashed, middle, text = written.removeprefix(_HEAD).partition(_MIDDLE)
        text = text.removesuffix(_TAIL)
        if written != f"{_HEAD}{hashed}{middle}{text}{_TAIL}" or xxhash.xxh3_128_hexdigest(text.encode()) != hashed:
            raise ValueError("the contents do not match the recorded hash")
        facts = json.loads(text)
        if facts["format"] != FORMAT:
            raise CheckpointError(f"{path} has format {facts['format']}, but this meshwise reads only {FORMAT}.")
        manifest = _manifest(facts)
        if name_of(manifest.facts["step"], manifest.facts["attempt"]) != saved.path.name:
            raise ValueError(f"it belongs to {name_of(manifest.facts['step'], manifest.facts['attempt'])}")
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing.") from None
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read ({error.strerror}).") from None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{path} is damaged ({error}).") from None
    return manifest


def _manifest(facts: dict[str, Any]) -> Manifest:
    def tensor(each: dict[str, Any]) -> StoredTensor:
        pieces = (StoredPiece(p["file"], p["at"], tuple((b, e) for b, e in p["box"])) for p in each["pieces"])
        return StoredTensor(each["dtype"], tuple(each["shape"]), tuple(pieces))

    return Manifest(
        facts["facts"],
        facts["values"],
        {name: tensor(each) for name, each in facts["tensors"].items()},
        tuple(StoredFile(**each) for each in facts["files"]),
    )


def wrong_with(folder: Path, file: StoredFile) -> str:
    """Return a text that says what is wrong with a file of a checkpoint, or "" if the file is as it was written."""
    path = folder / file.name
    try:
        if not path.is_file():
            return f"{file.name} is missing"
        if (size := path.stat().st_size) != file.size:
            return f"{file.name} has {size:,} bytes instead of {file.size:,}"
        return "" if hash_of(path) == file.hash else f"{file.name} is damaged: its hash differs from the recorded one"
    except OSError as error:
        return f"{file.name} cannot be read ({error.strerror})"


def hash_of(path: Path) -> str:
    """Return the hash of a file's bytes, in hexadecimal."""
    with path.open("rb", buffering=0) as file:
        return hashlib.file_digest(file, xxhash.xxh3_128).hexdigest()


def verified(saved: Checkpoint) -> str:
    """Return a text that says what is wrong with a checkpoint, or "" if every byte is as it was written."""
    try:
        files = read_manifest(saved).files
    except CheckpointError as error:
        return str(error)
    return next(filter(None, (wrong_with(saved.path, file) for file in files)), "")


def remove_leftovers(folder: Path, attempt: int) -> None:
    """Remove unfinished checkpoints of this attempt and of earlier attempts. They are left when processes are
    killed."""
    for path in folder.glob(f"step-*{PART}"):
        named = _NAME.match(path.name)
        if named and int(named[2]) <= attempt:
            shutil.rmtree(path, ignore_errors=True)


def commit(part: Path, manifest: Manifest, room: Path | None = None) -> Path:
    """Write the manifest of an unfinished checkpoint, and make the checkpoint complete by giving its folder the final
    name. Returns the renamed folder.

    If there is an older checkpoint with the same final name, it is deleted. Raises OSError, and keeps the older
    checkpoint, if a later attempt of the run has removed `room`.

    part: the folder, with a name that ends in `.part`.
    room: the directory of this attempt (see records/claims.py), to which the older checkpoint is moved before it is
        deleted. By default, the folder that contains `part`.
    """
    write_manifest(part, manifest)
    sync_folder(part)
    whole = part.with_name(part.name.removesuffix(PART))
    old = (room or part.parent) / f"{whole.name}.old{PART}"
    if whole.exists():  # an earlier save of the same step and attempt
        whole.rename(old)
    part.rename(whole)
    sync_folder(whole.parent)
    shutil.rmtree(old, ignore_errors=True)
    return whole


def prune(folder: Path, *, keep: int, abandoned: Iterable[Path] = (), room: Path | None = None) -> list[Path]:
    """Remove checkpoints until at most `keep` are left. The newest is never removed. Returns the folders that were
    removed.

    abandoned: checkpoints that the run no longer continues, because it resumed from an earlier one. They are removed
        first, then the oldest.
    room: the directory of this attempt (see records/claims.py), to which a checkpoint is moved before it is deleted. If
        another machine begins a later attempt, it removes `room`, and so this process can no longer remove checkpoints.
        By default, `folder`.
    """
    found, left = [saved.path for saved in checkpoints_in(folder)], set(abandoned)
    queue = sorted(found[:-1], key=lambda path: path not in left)
    removed: list[Path] = []
    while queue and len(queue) + 1 > keep:
        path = queue.pop(0)
        gone = (room or folder) / (path.name + PART)  # rename it first: half a folder must not look like a checkpoint
        with contextlib.suppress(OSError):
            path.rename(gone)
            shutil.rmtree(gone, ignore_errors=True)
            removed.append(path)
    return removed


def size_of(folder: Path) -> int:
    """Return the total size of a folder's files, in bytes, with those in folders below. Links do not count."""
    size = 0
    for path in folder.rglob("*"):
        with contextlib.suppress(OSError):
            facts = path.lstat()
            size += facts.st_size if stat.S_ISREG(facts.st_mode) else 0
    return size


def volume(box: Box) -> int:
    """Return the number of elements in a box."""
    return math.prod(end - begin for begin, end in box)


def disjoint(boxes: Iterable[Box]) -> list[Box]:
    """Choose boxes that do not overlap. The boxes are considered from the largest to the smallest, and the result is in
    this order. A box that overlaps a box that was chosen before is left out."""
    chosen: list[Box] = []
    for box in sorted(boxes, key=lambda box: (-volume(box), box)):
        if volume(box) and not any(_overlap(box, other) for other in chosen):
            chosen.append(box)
    return chosen


def cover(boxes: Iterable[Box], shape: Sequence[int]) -> bool:
    """Return whether disjoint boxes cover a whole tensor of this shape."""
    return sum(map(volume, boxes)) == math.prod(shape)


def _overlap(one: Box, other: Box) -> bool:
    return all(a < d and c < b for (a, b), (c, d) in zip(one, other, strict=True))
