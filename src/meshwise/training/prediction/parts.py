"""Turn predictions into rows, write them in parts, and join them.

    OUT.partial/                               exists until every sample is predicted
        facts.json                             facts on which the predictions depend
        000000000000-000000000512.jsonl        rows of samples 0 to 511; or a .safetensors file

Each rank writes its own parts, and each part is complete or absent, even after a kill.
At the end, rank 0 joins them to OUT.
"""

from __future__ import annotations

import contextlib
import inspect
import itertools
import json
import math
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy
import torch
from safetensors.torch import load_file, save, save_file
from torch import Tensor, nn

from meshwise.parallel.splits.crossing import gather
from meshwise.records.files import atomic_file, write_text
from meshwise.records.lock import PREDICTIONS_LOCK, FolderLock
from meshwise.spec.errors import UsageError
from meshwise.spec.words import some
from meshwise.torch_compat.tree import map_tensors
from meshwise.training.data.order import BatchSlice

Outputs = Mapping[str | int, Any]
"""For each output, the rows of some samples. The key is its name, its index in a tuple, or "" for a single output."""
Predict = Callable[[nn.Module, Any], Any]
POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
HOW = "Write Job(predict=lambda model, batch: model(...)), or mw.predict(..., predict=...)."


def plain_call(model: nn.Module, notify: Callable[[str], None]) -> Predict:
    """Return a function that calls a model on a batch, with arguments that fit the model's forward."""
    parameters, name = inspect.signature(model.forward).parameters, type(model).__name__
    any_name = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    needed = [p for p in parameters.values() if p.default is p.empty and p.kind in POSITIONAL]

    def call(model: nn.Module, batch: Any) -> Any:
        if isinstance(batch, Mapping):
            named = {key: value for key, value in batch.items() if any_name or key in parameters}
            if left := [str(key) for key in batch if key not in named]:
                notify(f"{name}.forward takes {', '.join(parameters)}, so it does not get {some(left)} of the batches")
            return model(**named)
        given = batch[: max(1, len(needed))] if isinstance(batch, tuple | list) else (batch,)
        return model(*given)

    return call


def rows_of(job: str, model: nn.Module, call: Predict, part: BatchSlice, batch: Any) -> dict[str | int, Any]:
    """Call the model on a batch, and return the rows of this rank's samples for each output."""
    named, size = _named(call(model, batch)), max(part.samples, 1)
    return {name: _rows(value, size, job)[: part.samples] for name, value in named.items()}


def _named(result: Any) -> Mapping[str | int, Any]:
    logits = getattr(result, "logits", None)
    if isinstance(result, Mapping):
        return {"": logits} if isinstance(logits, Tensor) else dict(result)
    if logits is not None:
        return {"": logits}
    return dict(enumerate(result)) if isinstance(result, tuple) else {"": result}


def _rows(value: Any, samples: int, job: str) -> Any:
    if isinstance(value, numpy.ndarray):
        value = torch.as_tensor(value)
    rows = -1
    if isinstance(value, Tensor):
        value = gather(value.detach()).cpu()
        rows = len(value) if value.dim() and not value.is_complex() else -1
    elif isinstance(value, list):
        value = map_tensors(lambda tensor: gather(tensor.detach()).tolist(), value)
        rows = len(value)
    if rows != samples:
        raise UsageError(
            f"job '{job}' must predict a real row for each of {samples} samples, in a tensor or a list, but predicts a "
            f"{type(value).__name__} of shape {tuple(getattr(value, 'shape', (rows,)))}. {HOW}"
        )
    return value


def merged(pieces: Sequence[Mapping[Any, Any]]) -> dict[Any, Any]:
    """Join the rows of all pieces: for each output a tensor, or a list of rows that cannot form a tensor."""
    names = {tuple(piece) for piece in pieces}
    if len(names) > 1:
        raise UsageError(f"the outputs have different names: {names}. Return the same for all batches.")
    return {name: _one([piece[name] for piece in pieces]) for name in pieces[0]}


def _one(values: Sequence[Any]) -> Any:
    if isinstance(values[0], Tensor) and len({(rows.dtype, rows.shape[1:]) for rows in values}) == 1:
        return torch.cat(list(values))
    return [row for rows in values for row in rows]


FACTS, LINES = "facts.json", ".jsonl"


def folder_of(out: Path) -> Path:
    """Return the folder that holds the parts of the file `out`."""
    return out.with_name(f"{out.name}.partial")


def _parts(out: Path) -> list[Path]:
    return sorted(folder_of(out).glob(f"[0-9]*-[0-9]*{out.suffix}"))


@contextlib.contextmanager
def locked_folder(out: Path, facts: Mapping[str, Any], *, overwrite: bool) -> Iterator[None]:
    """Create the folder for the parts of `out`, or continue in the folder of an earlier run, and lock it during the
    `with` block."""
    folder = folder_of(out)
    if overwrite:
        shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True, exist_ok=True)
    with contextlib.closing(FolderLock(folder, PREDICTIONS_LOCK)):
        if not (folder / FACTS).exists():
            write_text(folder / FACTS, json.dumps(facts, indent=2) + "\n")
        before = json.loads((folder / FACTS).read_text(encoding="utf-8"))
        for name, now in facts.items():
            if before.get(name) != now:
                raise UsageError(
                    f"{folder} contains predictions with {name} {before.get(name)!s:.80}, but this command has "
                    f"{now!s:.80}. Use the same {name}, name another --out, or start over with --overwrite."
                )
        yield


def left_of(samples: int, out: Path | None) -> Tensor:
    """Return the indices of the samples that are not in any part of `out` yet."""
    left = torch.ones(samples, dtype=torch.bool)
    for path in _parts(out) if out is not None else ():
        first, stop = map(int, path.stem.split("-"))
        left[first:stop] = False
    return left.nonzero().flatten()


def write_parts(out: Path, indices: Sequence[Tensor], pieces: Sequence[Outputs]) -> None:
    """Write rows to the folder of `out`, a file for each range of samples."""
    lines, tensors, samples = list[str](), dict[str, Tensor](), torch.cat(list(indices))
    if out.suffix == LINES:
        lines = [line for piece in pieces for line in _lines(piece)]
    else:
        before = [{name: rows[:0] for name, rows in load_file(path).items()} for path in _parts(out)[:1]]
        tensors = _tensors(before + [{_name(key): rows for key, rows in piece.items()} for piece in pieces])
    ends = [*((samples.diff() != 1).nonzero().flatten() + 1).tolist(), len(samples)]
    for start, end in itertools.pairwise([0, *ends]):
        first = int(samples[start])
        content = "".join(lines[start:end]).encode() or save({key: rows[start:end] for key, rows in tensors.items()})
        with atomic_file(folder_of(out) / f"{first:012}-{first + end - start:012}{out.suffix}") as file:
            file.write(content)


def _name(key: str | int) -> str:
    return f"output.{key}" if isinstance(key, int) else key or "output"


def _tensors(pieces: Sequence[Mapping[str, Any]]) -> dict[str, Tensor]:
    found = merged(pieces)
    for name, rows in found.items():
        if not isinstance(rows, Tensor):
            raise UsageError(
                f"a safetensors file holds tensors whose rows have one shape and dtype, but the rows of the prediction "
                f"{name} do not, or are no tensors. Name a {LINES} file, or pad all rows."
            )
    return found


def _lines(piece: Outputs) -> Iterator[str]:
    """Yield the predictions as lines of JSON, one line for each sample in `piece`."""
    columns = [_texts(rows) for rows in piece.values()]
    names = [json.dumps(name, ensure_ascii=False) for name in piece]
    for row in zip(*columns, strict=True):
        if 0 in piece:
            yield f"[{', '.join(row)}]\n"
        elif set(piece) == {""}:
            yield f"{row[0]}\n"
        else:
            yield f"{{{', '.join(f'{name}: {text}' for name, text in zip(names, row, strict=True))}}}\n"


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


def join_parts(out: Path, samples: int) -> None:
    """Join all parts to the file `out`, and remove their folder. Raises UsageError if samples are missing."""
    if lacking := len(left_of(samples, out)):
        raise UsageError(
            f"{folder_of(out)} lacks {lacking:,} of {samples:,} samples. Name an --out in a folder that all processes "
            "see, and run the command again."
        )
    with atomic_file(out) as file:
        if out.suffix == LINES:
            for path in _parts(out):
                file.write(path.read_bytes())
        else:
            save_file(_tensors([load_file(path) for path in _parts(out)]), file.name, {"format": "pt"})
    shutil.rmtree(folder_of(out), ignore_errors=True)
