"""Load the newest checkpoint that is whole.

All ranks first verify the checkpoint together. Then each rank reads what it needs.

A damaged checkpoint is reported in one printed line, and the checkpoint before it is used. Checkpoints of format 1
(`latest.json` and one `step-….pt`) can be read, too.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from meshwise.records import checkpoints as files
from meshwise.records.checkpoints import Checkpoint, Manifest
from meshwise.spec.errors import CheckpointError
from meshwise.spec.world import World
from meshwise.torch_compat.sharding import with_local
from meshwise.torch_compat.tree import map_kind
from meshwise.training.recovery.saving import seen_by_all
from meshwise.training.recovery.tensor_files import Held, TensorFiles
from meshwise.training.recovery.values import decoded
from meshwise.transfer import collectives
from meshwise.transfer.sharded import local_part, shard_like

LATEST = "latest.json"
AGAIN = "Start over, without --resume"


@dataclass(frozen=True)
class Stored:
    """A tensor in a checkpoint, read on demand."""

    files: TensorFiles
    name: str

    @property
    def shape(self) -> tuple[int, ...]:
        return self.files.tensors[self.name].shape

    @property
    def held(self) -> Held:
        """The dtype and shape of the tensor, as the `Held` of a rank that holds the whole tensor."""
        stored = self.files.tensors[self.name]
        return Held(stored.dtype, stored.shape, (tuple((0, length) for length in stored.shape),))

    def whole(self) -> Tensor:
        """Read the whole tensor."""
        return self.files.read(self.name)

    def like(self, tensor: Tensor) -> Tensor:
        """Read the stored tensor, sharded over the ranks in the same way as `tensor`."""
        if not isinstance(tensor, DTensor):
            return self.whole()
        if self.shape != tuple(tensor.shape):
            return shard_like(self.whole(), tensor) if self.shape else self.whole()
        part = local_part(tensor, lambda box: self.files.read(self.name, box))
        return with_local(tensor, part.to(tensor.device))


@dataclass(frozen=True)
class Loaded:
    """A checkpoint that was verified.

    tree: the state, whose leaves are plain values, and `Stored` objects or tensors.
    facts: the facts in the manifest, such as the step.
    """

    saved: Checkpoint
    tree: Any
    facts: Any


def whole(tree: Any) -> Any:
    """Return `tree` with each `Stored` object replaced by the whole tensor."""
    return map_kind(Stored, Stored.whole, tree)


def has_checkpoint(folder: Path) -> bool:
    """Return on all ranks whether rank 0 sees a checkpoint in `folder`. Collective."""
    every = collectives.everyone()
    return bool(collectives.broadcast_object(bool(files.checkpoints_in(folder)), every))


def load(folder: Path, world: World, say: Callable[[str], None], only: str | None = None, again: str = AGAIN) -> Loaded:
    """Load the newest undamaged checkpoint in `folder` on every rank. Collective.

    Raises CheckpointError if there is no undamaged checkpoint.

    say: called with a line of text about each damaged checkpoint.
    only: the name of the only checkpoint to consider.
    again: how to start over, for the message of the error.
    """
    every = collectives.everyone()
    first = world.rank == 0
    shared = seen_by_all(folder, world, "load")
    found: list[Checkpoint] = collectives.broadcast_object(_candidates(folder, only) if first else [], every)
    wrong: list[str] = []
    for saved in found:
        manifest, told = _read_manifest(saved) if first else (None, "")
        manifest, told = collectives.broadcast_object((manifest, told), every)
        if manifest is not None:
            own = manifest.files[world.rank :: world.size] if shared else manifest.files if first else ()
            told = next(filter(None, (files.wrong_with(saved.path, file) for file in own)), "")
            told = next(filter(None, collectives.gather_objects(told, every)), "")
        if manifest is not None and not told:
            if wrong and first:
                say(f"the checkpoint of {saved} is used instead.")
            return Loaded(saved, _tree(saved, manifest, shared, first), manifest.facts)
        wrong.append(f"{saved.path}: {told}")
        if first:
            say(f"the checkpoint of {saved} is not used: {told}.")
    if only is None and collectives.broadcast_object(first and (folder / LATEST).is_file(), every):
        return _load_old(folder, shared, first)
    raise CheckpointError(_none(folder, wrong, only, again))


def _none(folder: Path, wrong: list[str], only: str | None, again: str = AGAIN) -> str:
    if wrong:
        return f"no checkpoint can be used: {'; '.join(wrong)}. {again}."
    if only is not None:
        return f"{folder / only}: there is no such checkpoint. Use a name that meshwise checkpoints RUN lists."
    return f"{folder} has no checkpoint. Run with --save-every N, or start over."


def _candidates(folder: Path, only: str | None) -> list[Checkpoint]:
    found = files.checkpoints_in(folder)[::-1]
    return [saved for saved in found if only in (None, saved.path.name)]


def _read_manifest(saved: Checkpoint) -> tuple[Manifest | None, str]:
    try:
        return files.read_manifest(saved), ""
    except CheckpointError as error:
        return None, str(error).rstrip(".")


def _tree(saved: Checkpoint, manifest: Manifest, shared: bool, first: bool) -> Any:
    """Return the saved state."""
    if not shared:
        tree = whole(_stored(saved, manifest)) if first else None
        return collectives.broadcast_object(tree, collectives.everyone())
    return _stored(saved, manifest)


def _stored(saved: Checkpoint, manifest: Manifest) -> Any:
    opened = TensorFiles(saved.path, manifest.tensors)
    try:
        return decoded(manifest.values, lambda name: Stored(opened, name))
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CheckpointError(f"{saved.path}: the values in this checkpoint cannot be read ({error}).") from None


def open_newest(folder: Path, say: Callable[[str], None] = lambda text: None, only: str | None = None) -> Loaded:
    """Load the newest undamaged checkpoint in `folder` in this process alone, without calling other ranks."""
    wrong = []
    for saved in _candidates(folder, only):
        told = files.verified(saved)
        if not told:
            manifest = files.read_manifest(saved)
            return Loaded(saved, _stored(saved, manifest), manifest.facts)
        wrong.append(f"{saved.path}: {told}")
        say(f"the checkpoint of {saved} is not used: {told}.")
    if only is None and (folder / LATEST).is_file():
        return _old(*_verified_old(folder))
    raise CheckpointError(_none(folder, wrong, only))


# Format 1, which meshwise 0.1 wrote.


def _load_old(folder: Path, shared: bool, first: bool) -> Loaded:
    every = collectives.everyone()
    path, size = collectives.broadcast_object(_verified_old(folder) if first else None, every)
    if shared:
        return _old(path, size)
    found: Loaded = collectives.broadcast_object(_old(path, size) if first else None, every)
    return found


def _verified_old(folder: Path) -> tuple[Path, int]:
    """Return the newest state's file and the size of this file in bytes, for a folder of an older version."""
    try:
        facts = json.loads((folder / LATEST).read_text())
        path, expected = folder / facts["file"], facts["sha256"]
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
    except FileNotFoundError:
        raise CheckpointError(_none(folder, [], None)) from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{folder / LATEST} cannot be read ({error}).") from None
    if digest != expected:
        raise CheckpointError(
            f"{path} is damaged: its SHA-256 differs from the recorded one. The same folder may contain older states."
        )
    return path.resolve(), path.stat().st_size


def _old(path: Path, size: int) -> Loaded:
    try:
        saved = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:
        raise CheckpointError(f"{path} cannot be read ({str(error).partition(chr(10))[0]}).") from None
    if not isinstance(saved, dict):
        raise CheckpointError(f"{path} does not contain the state of a run.")
    if saved.get("format") != 1:
        raise CheckpointError(f"{path} has format {saved.get('format')}, which this version of meshwise cannot read.")
    return Loaded(Checkpoint(0, int(saved.get("step", 0)), path), saved, {"step": saved.get("step", 0)})
