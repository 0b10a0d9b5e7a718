"""Save a state in a background thread.

Each rank first copies to host memory what it will write.

The training thread only makes the copy, and checks whether the ranks still hold the same parts as at the previous save.
"""

from __future__ import annotations

import contextlib
import hashlib
import secrets
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed import HashStore, Store  # type: ignore[attr-defined]

from meshwise.records import checkpoints as files
from meshwise.records.checkpoints import Checkpoint, volume
from meshwise.records.claims import newest, room_of
from meshwise.records.files import make_folder
from meshwise.reports.recorder import current
from meshwise.spec.devices import has_streams
from meshwise.spec.errors import CheckpointError, SaveError
from meshwise.spec.saves import Saves
from meshwise.spec.world import World
from meshwise.torch_compat.reducer import own_connection_to_store
from meshwise.training.recovery.tensor_files import Held, as_bytes, deal, held, laid_out, plainly_held, views
from meshwise.training.recovery.values import encoded, merged
from meshwise.training.recovery.writing import LAST, Content, Deal, Writing
from meshwise.transfer import collectives
from meshwise.transfer.sharded import BUCKET, Box
from meshwise.workers.environment import attempt
from meshwise.workers.join import rank_context

DEFAULT = Saves()
Copied = tuple[str, Box, Tensor]
"""A copy to make: (tensor's name, region of it on this rank, target buffer)."""
OVER = (
    "a later attempt of this run began while this attempt was frozen or cut off from the network. This attempt ends "
    "now. Nothing that it has written since then is used."
)
BACKGROUND = "background"
"""The key in a manifest for whether the state was saved by default, in the middle of the training."""
PATIENCE = 10.0  # seconds that a save may take before the next one is skipped


class Saver:
    """Saves the state of a run into `folder`, repeatedly. Every rank makes a Saver, and calls `settle` or `close` at
    the end."""

    def __init__(
        self,
        folder: Path,
        world: World,
        say: Callable[[str], None],
        *,
        saves: Saves = DEFAULT,
        resumed: Checkpoint | None = None,
        number: int | None = None,
    ) -> None:
        """say: called with a line of text for the user. saves: how many checkpoints to keep. resumed: the checkpoint
        from which the run was resumed. number: the number of the attempt, if the caller has reserved it in `folder` by
        `claim` (records/claims.py)."""
        self.folder, self._world, self._say = folder, world, say
        self._saves, self._resumed, self._claimed = saves, resumed, number
        self._gate, self._asked = rank_context().gate, 0.0
        self._gate.saves = True
        self._begun: tuple[str, int, bool] | None = None
        self._store: Store | None = None
        self._deal: Deal | None = None
        self._own: tuple[Deal, bytes, Tensor, list[Copied]] | None = None  # the buffer for `_deal`: see `_buffer_of`
        self._writing: Writing | None = None
        self._thread: threading.Thread | None = None
        self._number = 0
        self.saved = -1
        """The newest step of this session that is known to be saved completely."""
        self.wrong = ""
        """The reason why the last save failed, or "" if it did not fail."""
        self.stall_seconds = self.write_seconds = 0.0
        """How many seconds the last save stopped the training, and how many its background writing took."""

    def size_of(self, make: Callable[[], Any]) -> int:
        """Return how many bytes the tensors of a state take, over all ranks. make: as in `save`. Collective."""
        self._begin()
        shapes = {name: held(tensor) for name, tensor in self._encoded(make())[1].items()}
        ranks = collectives.gather_from_all(shapes)
        return sum(each.size for each in {name: each for rank in ranks for name, each in rank.items()}.values())

    def save(
        self, make: Callable[[], Any], facts: Mapping[str, Any], *, wait: bool = False, began: float | None = None
    ) -> bool:
        """Save a state, or return False if an earlier state is still being written. make: returns what this rank holds
        of the state, as a tree of plain values and tensors."""
        with current().span("checkpoint"):
            self._asked = time.monotonic() if began is None else began
            key, number, _ = self._begin()
            self._settle(None if wait else PATIENCE)
            values, tensors = self._encoded(make())
            shapes = {name: held(tensor) for name, tensor in tensors.items()}
            # `hash` differs between processes, so each rank's hash is only compared with its own earlier hashes.
            digests = (hash(tuple(shapes.items())), hashlib.blake2b(repr(values).encode()).digest())
            over = self._world.rank == 0 and newest(files.claims_folder(self.folder)) > number
            ranks = collectives.gather_from_all((self._writing is not None, digests, over))
            if ranks[0][2]:
                raise SaveError(OVER)
            if any(busy for busy, _, _ in ranks):
                self.tell(f"step {facts['step']} is not saved: the state before it is still being written.")
                return False
            values = self._agreed(values, shapes, [each for _, each, _ in ranks])
            facts = {"attempt": number, "world": self._world.size, "time": time.time(), **facts}
            self._start(key, facts, values, tensors)
            self.stall_seconds = time.monotonic() - self._asked
        return True

    def _begin(self) -> tuple[str, int, bool]:
        """Prepare the folder, once. Return (key, attempt number, whether all ranks see the folder)."""
        if self._begun is None:
            self._store = own_connection_to_store() if self._world.size > 1 else HashStore()
            key = secrets.token_hex(8)
            if self._world.rank == 0:
                with contextlib.suppress(OSError):  # if this fails, the write reports the error
                    make_folder(self.folder)
                    files.remove_leftovers(self.folder, self._numbered())
            number = self._numbered()
            key, number = collectives.tell_all((key, number))
            self._begun = key, number, seen_by_all(self.folder, self._world, key)
            if not self._begun[2]:
                self.tell(f"not every machine sees {self.folder}: rank 0 writes the whole state.")
        return self._begun

    def _numbered(self) -> int:
        """Return the number of this attempt, which becomes part of the names of its checkpoints."""
        if self._claimed is not None:
            return self._claimed
        claimed = newest(files.claims_folder(self.folder)) > 0
        return attempt() if claimed else max([attempt(), *(c.attempt + 1 for c in self._known())])

    def _known(self) -> list[Checkpoint]:
        try:
            return files.checkpoints_in(self.folder)
        except OSError:
            return []

    def _encoded(self, tree: Any) -> tuple[Any, dict[str, Tensor]]:
        values, tensors = encoded(tree)
        return values, {name: plainly_held(tensor) for name, tensor in tensors.items()}

    def _agreed(self, values: Any, shapes: Mapping[str, Held], digests: Sequence[tuple[int, str]]) -> Any:
        """Return all ranks' plain values, merged into one tree. Update `_deal` if it is outdated."""
        own = tuple(each for each, _ in digests)
        if self._deal is None or self._deal.digests != own:
            ranks = collectives.gather_from_all(shapes)
            every = {name: each for rank in reversed(ranks) for name, each in rank.items()}
            self._deal = Deal(own, every, deal(ranks))
        if len({each for _, each in digests}) == 1:
            return values
        return merged(collectives.gather_from_all(values))

    def _start(self, key: str, facts: Mapping[str, Any], values: Any, tensors: Mapping[str, Tensor]) -> None:
        """Copy what this rank writes, and start a thread that writes the copy."""
        assert self._deal is not None
        rank = self._world.rank
        if self._own is None or self._own[0] is not self._deal:
            self._own = None  # free the old buffer before allocating another
            self._own = self._deal, *_buffer_of(self._deal, rank, pinned=has_streams(self._world.device))
        _, beginning, buffer, copies = self._own
        for name, box, into in copies:
            into.copy_(views(tensors[name])[box], non_blocking=True)
        if has_streams(self._world.device):
            torch.get_device_module(self._world.device).current_stream().synchronize()
        self._number += 1
        content = [(f"rank{rank}.safetensors", beginning, as_bytes(buffer))] if copies else []
        if self._begun is not None and not self._begun[2]:
            content = self._sent(buffer, content)
        folder = self.folder / (files.name_of(facts["step"], facts["attempt"]) + files.PART)
        self._writing = Writing(
            rank,
            self._world.size,
            f"meshwise/checkpoint/{key}/{self._number}",
            folder,
            content,
            self._deal,
            facts,
            values,
            self._store,
            room=room_of(files.claims_folder(self.folder), facts["attempt"]),
        )
        self._thread = threading.Thread(target=self._written, args=(self._writing,), name="checkpoint", daemon=True)
        self._thread.start()

    def _sent(self, own: Tensor, content: list[Content]) -> list[Content]:
        """Send every rank's content to rank 0. Return what to write: everything on rank 0, nothing on other ranks."""
        assert self._deal is not None
        everyone = collectives.everyone()
        device = collectives.device_of(everyone)
        for rank in range(1, self._world.size):
            if self._world.rank == 0:
                beginning, _, size = laid_out(self._deal.parts[rank], self._deal.shapes)
                buffer = torch.empty(size - len(beginning), dtype=torch.uint8)
                for chunk in buffer.split(BUCKET) if len(buffer) else ():
                    chunk.copy_(collectives.receive(torch.empty_like(chunk, device=device), rank, everyone))
                content.append((f"rank{rank}.safetensors", beginning, as_bytes(buffer)))
            elif self._world.rank == rank:
                for chunk in own.split(BUCKET) if len(own) else ():
                    collectives.send(chunk.to(device), 0, everyone)
        return content if self._world.rank == 0 else []

    def _written(self, writing: Writing) -> None:
        """Write a checkpoint, report the result, and remove older checkpoints."""
        writing.run()
        self.write_seconds = time.monotonic() - writing.began
        step, before = writing.facts["step"], self.wrong
        if writing.said:
            if not before:  # report only the first of several failures in a row
                self.tell(
                    f"step {step} could not be saved: {writing.said}. Earlier checkpoints are unharmed. The next save "
                    "will be tried as usual; a note says when it succeeds."
                )
            return
        self._gate.longest_save = max(self._gate.longest_save, time.monotonic() - self._asked)
        if before:
            self.tell(f"saving works again: step {step} is saved.")
        if writing.rank == 0 and (writing.room is not None or not newest(files.claims_folder(self.folder))):
            found = self._known()
            # Those that the run abandoned when it resumed: they are damaged, or the user chose an earlier one.
            earlier = [c for c in found if c.attempt < writing.facts["attempt"]]
            left = [] if self._resumed is None else [c.path for c in earlier if c > self._resumed]
            old = [] if writing.facts.get(BACKGROUND) or not self._saves.in_background else in_background(found[:-1])
            keep = min(self._saves.keep, len(found) - len(old))
            files.prune(self.folder, keep=keep, abandoned=[*old, *left], room=writing.room)

    def _settle(self, patience: float | None) -> None:
        """Wait for the save that is being written, until `patience` seconds after its start."""
        if self._thread is None or self._writing is None:
            return
        left = None if patience is None else max(0.0, self._writing.began + patience - time.monotonic())
        self._thread.join(left)
        if not self._thread.is_alive():
            self.wrong = self._writing.said
            self.saved = self.saved if self.wrong else self._writing.facts["step"]
            self._writing = self._thread = None

    def settle(self) -> None:
        """Wait until the last save has been written or has failed, and record its result in `saved` and `wrong`."""
        with current().span("checkpoint"):
            self._settle(None)

    def close(self) -> None:
        """Stop saving, because the run has failed."""
        if self._writing is not None and self._thread is not None:
            self._writing.closing.set()
            self._thread.join(LAST)

    def tell(self, text: str) -> None:
        """Tell the user a line of text, once for all ranks."""
        if self._world.rank == 0:
            self._say(text)


def in_background(found: Sequence[Checkpoint]) -> list[Path]:
    """Return the paths of the checkpoints that were saved in the background. Empty if one is unreadable."""
    with contextlib.suppress(CheckpointError):
        return [saved.path for saved in found if files.read_manifest(saved).facts.get(BACKGROUND)]
    return []


def _buffer_of(deal: Deal, rank: int, *, pinned: bool) -> tuple[bytes, Tensor, list[Copied]]:
    """Return the header of a rank's file, a buffer for the rest of the file, and the list of copies that fill this
    buffer."""
    beginning, places, size = laid_out(deal.parts[rank], deal.shapes)
    buffer, copies = torch.empty(size - len(beginning), dtype=torch.uint8, pin_memory=pinned), []
    for part, at in places.items():
        dtype: torch.dtype = getattr(torch, deal.shapes[part.name].dtype)
        begin, lengths = at - len(beginning), [end - begin for begin, end in part.box]
        into = buffer[begin : begin + volume(part.box) * dtype.itemsize].view(dtype).view(lengths)
        copies.append((part.name, part.box, into))
    return beginning, buffer, copies


def seen_by_all(folder: Path, world: World, key: str) -> bool:
    """Return whether every rank sees what rank 0 writes into `folder`. Collective if there are several machines."""
    if world.local_size == world.size:
        return True
    sign, everyone = folder / f".seen-{key}", collectives.everyone()
    if world.rank == 0:
        with contextlib.suppress(OSError):
            sign.write_text(key)
    collectives.barrier(everyone)
    seen = collectives.gather_from_all(sign.exists())
    if world.rank == 0:
        sign.unlink(missing_ok=True)
    return all(seen)
