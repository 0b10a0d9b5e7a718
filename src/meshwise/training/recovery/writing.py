"""Write one save by a protocol that survives any process's death.

The protocol runs in a thread beside the training.

Every rank writes its file into `step-….part`, syncs it to the disk, and tells rank 0 the file's size and hash. Rank 0
writes the manifest and gives the folder its final name. From then on the checkpoint exists. The ranks exchange messages
through a key-value store of torch, because a thread must not call collectives.

`torch.distributed.checkpoint` is not used. Its `.metadata` is a pickle, and it does not verify what it reads, so that a
flipped bit, a hole of zeros or a mixture of two saves loads silently.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from meshwise.records import checkpoints as files
from meshwise.records.checkpoints import Manifest, StoredFile, StoredPiece, StoredTensor, write_file
from meshwise.records.files import make_folder
from meshwise.spec.units import bytes_text
from meshwise.training.recovery.tensor_files import Held, WriteItem, laid_out

LAST = 5.0  # seconds that a failed run waits for the checkpoint being written
Content = tuple[str, bytes, memoryview]
"""A file to write: its name, its header, and the rest."""
POLL, SLOWEST = 0.001, 0.05  # seconds between two polls of the store: at first, and at most


@dataclass(frozen=True)
class Deal:
    """Says which rank writes which parts of the tensors into a checkpoint. All ranks have the same `Deal`."""

    digests: tuple[int, ...]
    shapes: Mapping[str, Held]
    parts: Sequence[Sequence[WriteItem]]


@dataclass
class Writing:
    """One save on one rank, with everything that its thread needs."""

    rank: int
    size: int
    key: str
    folder: Path
    content: Sequence[Content]
    deal: Deal
    facts: Mapping[str, Any]
    values: Any
    store: Any
    began: float = field(default_factory=time.monotonic)
    closing: threading.Event = field(default_factory=threading.Event)
    said: str = ""
    room: Path | None = None
    """The directory of this attempt of the run (`room_of` in records/claims.py), or None."""

    @property
    def bytes(self) -> int:
        """The total size of all tensors of the state, in bytes."""
        return sum(held.size for held in self.deal.shapes.values())

    def run(self) -> None:
        """Write this rank's file, and wait until rank 0 has committed or removed the checkpoint."""
        with contextlib.suppress(OSError, AttributeError):  # only Linux has a priority for each thread
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 10)
        try:
            self.store.set(f"{self.key}/{self.rank}", json.dumps(self._write()))
            if self.rank == 0:
                self.store.set(f"{self.key}/whole", self._commit())
            self.said = self._awaited(f"{self.key}/whole")
        except Exception as error:  # e.g. rank 0 has ended, and its store with it
            self.said = self.said or f"the exchange with the other ranks failed: {error}"

    def _write(self) -> list[dict[str, Any]] | str:
        """Write this rank's file. Returns its description, or a text that says why it could not be written."""
        try:
            make_folder(self.folder)
            return [asdict(write_file(self.folder / name, head, rest)) for name, head, rest in self.content]
        except OSError as error:
            return why_not(error, self.folder.parent, self.bytes)
        except Exception as error:
            return f"{type(error).__name__}: {error}"

    def _commit(self) -> str:
        """Wait until every rank has written, then commit the checkpoint. Return an error text, or ""."""
        ranks = [json.loads(self._awaited(f"{self.key}/{rank}")) for rank in range(self.size)]
        wrong = next((f"rank {rank}: {told}" for rank, told in enumerate(ranks) if isinstance(told, str)), "")
        if not wrong:
            try:
                written = [StoredFile(**each) for told in ranks for each in told]
                files.commit(self.folder, self._manifest(written), self.room)
            except OSError as error:
                wrong = why_not(error, self.folder.parent, self.bytes)
        if wrong:
            shutil.rmtree(self.folder, ignore_errors=True)
        return wrong

    def _manifest(self, written: Sequence[StoredFile]) -> Manifest:
        pieces: dict[str, list[StoredPiece]] = {name: [] for name in self.deal.shapes}
        for rank, parts in enumerate(self.deal.parts):
            for part, at in laid_out(parts, self.deal.shapes)[1].items():
                pieces[part.name].append(StoredPiece(f"rank{rank}.safetensors", at, part.box))
        tensors = {n: StoredTensor(h.dtype, h.shape, tuple(pieces[n])) for n, h in self.deal.shapes.items()}
        seconds = round(time.monotonic() - self.began, 3)  # a run that is stopped needs some of these
        return Manifest({**self.facts, "seconds": seconds}, self.values, tensors, tuple(written))

    def _awaited(self, key: str) -> str:
        pause, closed = POLL, 0.0
        while not self.store.check([key]):
            time.sleep(pause)
            pause = min(pause * 1.2, SLOWEST)
            closed = closed or (time.monotonic() if self.closing.is_set() else 0.0)
            if closed and time.monotonic() - closed > LAST:
                raise TimeoutError("the run ended before every rank had written its part")
        return bytes(self.store.get(key)).decode()


def why_not(error: OSError, folder: Path, needed: int) -> str:
    """Return a text that says why a write failed, with the free and the needed disk space."""
    free = ""
    with contextlib.suppress(OSError):
        free = f", {bytes_text(shutil.disk_usage(folder).free)} free, {bytes_text(needed)} needed"
    return f"{error.filename or folder}: {error.strerror or error}{free}"
