"""Load the newest checkpoint that is whole.

All ranks first verify the checkpoint together. Then each rank reads what it needs.

A damaged checkpoint is reported in one printed line, and the checkpoint before it is used.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor

from meshwise.records import checkpoints as files
from meshwise.records.checkpoints import Checkpoint, Manifest, StoredTensor
from meshwise.spec.errors import CheckpointError
from meshwise.spec.world import World
from meshwise.torch_compat.sharding import with_local
from meshwise.torch_compat.tree import map_kind
from meshwise.training.recovery.saving import seen_by_all
from meshwise.training.recovery.tensor_files import read as read_box
from meshwise.training.recovery.tensor_files import whole_box
from meshwise.training.recovery.values import decoded
from meshwise.transfer import collectives
from meshwise.transfer.sharded import local_part, shard_like

ALONE = World()


@dataclass(frozen=True)
class Stored:
    """A tensor in a checkpoint, read on demand."""

    folder: Path
    tensor: StoredTensor

    @property
    def shape(self) -> tuple[int, ...]:
        return self.tensor.shape

    def whole(self) -> Tensor:
        """Read the whole tensor."""
        return read_box(self.folder, self.tensor, whole_box(self.shape))

    def like(self, tensor: Tensor) -> Tensor:
        """Read the stored tensor, sharded over the ranks in the same way as `tensor`."""
        if not isinstance(tensor, DTensor):
            return self.whole()
        if self.shape != tuple(tensor.shape):
            return shard_like(self.whole(), tensor) if self.shape else self.whole()
        part = local_part(tensor, lambda box: read_box(self.folder, self.tensor, [(s.start, s.stop) for s in box]))
        return with_local(tensor, part.to(tensor.device))


@dataclass(frozen=True)
class Loaded:
    """A checkpoint that was verified.

    tree: the state, whose leaves are plain values, and `Stored` objects or tensors.
    """

    saved: Checkpoint
    tree: Any


def whole(tree: Any) -> Any:
    """Return `tree` with each `Stored` object replaced by the whole tensor."""
    return map_kind(Stored, Stored.whole, tree)


def has_checkpoint(folder: Path) -> bool:
    """Return on all ranks whether rank 0 sees a checkpoint in `folder`. Collective."""
    return bool(collectives.tell_all(bool(files.checkpoints_in(folder))))


def load(
    folder: Path,
    world: World = ALONE,
    say: Callable[[str], None] = lambda text: None,
    only: str | None = None,
) -> Loaded:
    """Load the newest undamaged checkpoint in `folder` on every rank. Collective.

    Raises CheckpointError if there is no undamaged checkpoint.

    say: called with a line of text about each damaged checkpoint.
    only: the name of the only checkpoint to consider.
    """
    first, wrong = world.rank == 0, list[str]()
    shared = seen_by_all(folder, world, "load")
    found = [saved for saved in files.checkpoints_in(folder)[::-1] if only in (None, saved.path.name)]
    for saved in collectives.tell_all(found):
        manifest, told = collectives.tell_all(_read_manifest(saved) if first else None)
        if manifest is not None:
            own = manifest.files[world.rank :: world.size] if shared else manifest.files if first else ()
            told = next(filter(None, (files.wrong_with(saved.path, file) for file in own)), "")
            told = next(filter(None, collectives.gather_from_all(told)), "")
        if manifest is not None and not told:
            if wrong and first:
                say(f"the checkpoint of {saved} is used instead.")
            tensors = {name: Stored(saved.path, tensor) for name, tensor in manifest.tensors.items()}
            tree = decoded(manifest.values, tensors.__getitem__)
            if not shared:
                tree = collectives.tell_all(whole(tree) if first else None)
            return Loaded(saved, tree)
        wrong.append(f"{saved.path}: {told}")
        if first:
            say(f"the checkpoint of {saved} is not used: {told}.")
    if wrong:
        raise CheckpointError(
            f"no checkpoint can be used: {'; '.join(wrong)}. Start over, without --resume or in another folder."
        )
    raise CheckpointError(
        f"{folder / (only or '')}: there is no checkpoint. Run with --save-every N, start over, or name one that "
        "meshwise checkpoints RUN lists."
    )


def _read_manifest(saved: Checkpoint) -> tuple[Manifest | None, str]:
    try:
        return files.read_manifest(saved), ""
    except CheckpointError as error:
        return None, str(error).rstrip(".")
