"""Write predictions to a file that survives a kill.

The file holds whole samples in their order, so that a killed run can be continued.

    OUT.partial/                        until every sample is there
        facts.json                      what they are predictions of
        outputs.jsonl                   a line a sample; a torn last one is dropped
        000000000-000000512.safetensors or a file a piece, each whole or not there

The finished predictions are moved to OUT. Pieces are joined by reading one after the other.

Tested in tests/prediction/test_predict.py.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import shutil
import struct
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, Protocol

import torch
from safetensors import safe_open
from safetensors.torch import save
from torch import Tensor

from meshwise.records.files import atomic_file, write_text, write_with
from meshwise.spec.errors import UsageError

Outputs = Mapping[str | int, Any]
"""For each output, the rows of some samples. The key is its name, its index in a tuple, or "" for a single output."""
FACTS = "facts.json"


class Store(Protocol):
    """A store for predictions, in memory or in a file."""

    def begin(self, multiple: int) -> int:
        """Prepare the store, and return how many samples it already holds from an earlier run, counted from the first
        sample. Predicting continues after these samples.

        If the last stored batch is incomplete, a store may remove its rows. The removed rows do not count.

        multiple: the number of samples in a batch.
        """

    def add(self, first: int, pieces: Sequence[Outputs]) -> None:
        """Append rows of predictions to the store.

        first: the index of the sample to which the first row belongs.
        """

    def finish(self) -> Any:
        """Complete the store after the rows of the last sample were added. A store in memory returns the outputs. A
        store in a file moves the finished file to its final path, and returns None."""


class InMemory:
    """Keeps predictions in memory, as a tensor with a row per sample, or as a list of rows if their shapes differ."""

    def __init__(self) -> None:
        self._pieces: list[Outputs] = []

    def begin(self, multiple: int) -> int:
        return 0

    def add(self, first: int, pieces: Sequence[Outputs]) -> None:
        self._pieces += pieces

    def finish(self) -> Any:
        whole = {name: _joined([piece[name] for piece in self._pieces]) for name in self._pieces[0]}
        if set(whole) == {""}:
            return whole[""]
        return tuple(whole.values()) if 0 in whole else whole


def _joined(rows: Sequence[Any]) -> Any:
    if isinstance(rows[0], Tensor) and len({tuple(each.shape[1:]) for each in rows}) == 1:
        return torch.cat(list(rows))
    return [row for each in rows for row in each]


class PartialFolder:
    """The folder `OUT.partial`, which holds unfinished predictions. Only one process at a time can open it."""

    def __init__(self, out: Path) -> None:
        self.out, self.path = out, out.with_name(f"{out.name}.partial")
        self._lock: BinaryIO | None = None

    def open(self, facts: Mapping[str, Any], *, overwrite: bool) -> str:
        """Create the folder, or open one that an earlier run began. Return a note for the user, or an empty string.

        facts: what the predictions depend on. They are stored in the folder.
        overwrite: whether to delete an existing folder first.

        Raises UsageError if the earlier run had other facts (except `source`), or if another process uses the folder.
        """
        if overwrite:
            shutil.rmtree(self.path, ignore_errors=True)
        self.path.mkdir(parents=True, exist_ok=True)
        self._take()
        if not (self.path / FACTS).exists():
            write_text(self.path / FACTS, json.dumps(facts, indent=2) + "\n")
            return ""
        try:
            before = dict(json.loads((self.path / FACTS).read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError) as error:
            raise UsageError(f"{self.path / FACTS} cannot be read ({error}). Start over with --overwrite.") from None
        for name in facts:
            if name != "source" and before.get(name) != facts[name]:
                raise UsageError(
                    f"{self.path} contains predictions with {name} {_short(before.get(name))}, but this command has "
                    f"{name} {_short(facts[name])}. Use the earlier {name} to continue, name another --out, or start "
                    "over with --overwrite."
                )
        edited = before.get("source") != facts.get("source")
        return "the job's file was edited: predictions that exist already come from the file before" if edited else ""

    def _take(self) -> None:
        """Lock the folder. Raises UsageError if another process has locked it."""
        try:
            import fcntl
        except ImportError:  # Windows
            return
        self._lock = (self.path / "lock").open("ab")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise UsageError(f"another process is writing {self.out}. Wait, or name another --out.") from None

    def remove(self) -> None:
        """Remove the folder. Called after its content has been moved to the output file."""
        self.close()
        shutil.rmtree(self.path, ignore_errors=True)

    def close(self) -> None:
        """Unlock the folder."""
        if self._lock is not None:
            self._lock.close()


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 80 else f"{text[:60]}…{text[-15:]}"


class Lines:
    """Stores predictions as JSON lines: a number, list or object per sample.

    NaN is written as null and infinity as 1e999, since JSON has neither.
    """

    def __init__(self, folder: PartialFolder) -> None:
        self.folder, self._path = folder, folder.path / "outputs.jsonl"

    def begin(self, multiple: int) -> int:
        if not self._path.exists():
            return 0
        kept = end = place = 0
        with self._path.open("rb+") as file:
            for number, line in enumerate(file, 1):
                if not line.endswith(b"\n") or b"\0" in line:
                    break
                place += len(line)
                if number % multiple == 0:
                    kept, end = number, place
            file.truncate(end)
        return kept

    def add(self, first: int, pieces: Sequence[Outputs]) -> None:
        text = "".join(f"{line}\n" for piece in pieces for line in _lines(piece))
        with self._path.open("ab") as file:
            file.write(text.encode())

    def finish(self) -> None:
        with self._path.open("ab") as file:
            os.fsync(file.fileno())
        self._path.replace(self.folder.out)
        self.folder.remove()


def _lines(piece: Outputs) -> Iterator[str]:
    """Yield the predictions as lines of JSON, one line for each sample in `piece`."""
    columns = [_texts(rows) for rows in piece.values()]
    if set(piece) == {""}:
        yield from columns[0]
    elif 0 in piece:
        yield from (f"[{', '.join(row)}]" for row in zip(*columns, strict=True))
    else:
        names = [json.dumps(name, ensure_ascii=False) for name in piece]
        for row in zip(*columns, strict=True):
            yield f"{{{', '.join(f'{name}: {text}' for name, text in zip(names, row, strict=True))}}}"


def _texts(rows: Any) -> list[str]:
    if not isinstance(rows, Tensor):
        try:
            return [json.dumps(row, ensure_ascii=False, allow_nan=False) for row in rows]
        except (TypeError, ValueError) as error:
            raise UsageError(
                f"a prediction cannot be written as JSON: {error}. Return tensors, numbers or strings."
            ) from None
    texts = list(map(json.dumps, rows.tolist()))
    if rows.is_floating_point() and not math.isfinite(rows.sum()):
        texts = [text.replace("NaN", "null").replace("Infinity", "1e999") for text in texts]
    return texts


class Pieces:
    """Stores predictions as safetensors: a tensor `output` with a row per sample, or a tensor for each name if the
    model returns a dict."""

    def __init__(self, folder: PartialFolder) -> None:
        self.folder = folder
        self._form: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {}

    def begin(self, multiple: int) -> int:
        done = 0
        for path in self._files():
            first, stop = map(int, path.stem.split("-"))
            if first != done:
                path.unlink()
                continue
            if not done:
                with safe_open(path, "pt") as opened:
                    self._check(first, {name: opened.get_tensor(name) for name in opened.keys()})  # noqa: SIM118
            done = stop
        return done

    def add(self, first: int, pieces: Sequence[Outputs]) -> None:
        tensors: dict[str, Tensor] = {}
        for piece in pieces:
            self._check(first, {_name(key): rows for key, rows in piece.items()})
        for key in pieces[0]:
            tensors[_name(key)] = torch.cat([piece[key] for piece in pieces]).contiguous()
        stop = first + sum(len(next(iter(piece.values()))) for piece in pieces)
        path = self.folder.path / f"{first:012d}-{stop:012d}.safetensors"
        write_with(path, lambda file: file.write(save(tensors)))

    def _check(self, first: int, tensors: Mapping[str, Any]) -> None:
        """Raise UsageError for outputs that are not tensors, or have a different shape or dtype than earlier
        outputs."""
        for name, rows in tensors.items():
            if not isinstance(rows, Tensor):
                raise UsageError(
                    f"--out {self.folder.out}: a safetensors file holds only tensors, and the prediction {name} is a "
                    f"list of {type(rows[0]).__name__}. Name a .jsonl file."
                )
            form = rows.dtype, tuple(rows.shape[1:])
            known = self._form.setdefault(name, form)
            if form != known:
                words = [f"{tuple(shape)} of {str(dtype).removeprefix('torch.')}" for dtype, shape in (known, form)]
                raise UsageError(
                    f"--out {self.folder.out}: the prediction {name} is {words[0]} for the first samples and "
                    f"{words[1]} from sample {first} on, so it is not one tensor. Name a .jsonl file, or pad all rows."
                )

    def _files(self) -> list[Path]:
        return sorted(self.folder.path.glob("[0-9]*-[0-9]*.safetensors"))

    def finish(self) -> None:
        files, at = self._files(), 0
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        with safe_open(files[0], "pt") as opened:
            dtypes = {name: opened.get_slice(name).get_dtype() for name in opened.keys()}  # noqa: SIM118
        samples = int(files[-1].stem.split("-")[1])
        for name, (dtype, shape) in self._form.items():
            size = samples * math.prod(shape) * dtype.itemsize
            header[name] = {"dtype": dtypes[name], "shape": [samples, *shape], "data_offsets": [at, at + size]}
            at += size
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        with atomic_file(self.folder.out) as file:
            file.write(struct.pack("<Q", len(text)) + text)
            for name in self._form:
                for path in files:
                    with safe_open(path, "pt") as opened:
                        file.write(opened.get_tensor(name).reshape(-1).view(torch.uint8).numpy())
        self.folder.remove()


def _name(key: str | int) -> str:
    return f"output.{key}" if isinstance(key, int) else key or "output"


@contextlib.contextmanager
def saying_what_is_kept(out: Path | None) -> Iterator[None]:
    """Within the context, convert an OSError to a UsageError. Its message adds that the predictions written so far are
    kept."""
    try:
        yield
    except OSError as error:
        raise UsageError(
            f"--out {out} cannot be written ({error.strerror or error}). What was written is kept. To continue, run "
            "the same command again."
        ) from None
