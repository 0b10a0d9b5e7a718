"""Turn a model's predictions for a batch into rows, one per sample.

Tested in tests/prediction/test_predict.py.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy
import torch
from torch import Tensor, nn

from meshwise.compat.tree import map_tensors
from meshwise.data.order import BatchSlice
from meshwise.spec.errors import UsageError
from meshwise.spec.words import some
from meshwise.splits.crossing import gather

Outputs = Mapping[str | int, Any]
"""For each output, the rows of some samples. The key is its name, its index in a tuple, or "" for a single output."""
Predict = Callable[[nn.Module, Any], Any]
POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
HOW = "Write Job(predict=lambda model, batch: model(...)), or mw.predict(..., predict=...)."


def plain_call(model: nn.Module, notify: Callable[[str], None]) -> Predict:
    """Return a function that calls a model on a batch, with arguments that fit the model's forward."""
    signature, name = inspect.signature(model.forward), type(model).__name__
    kinds = [p.kind for p in signature.parameters.values()]
    needed = [p for p in signature.parameters.values() if p.default is p.empty and p.kind in POSITIONAL]

    def call(model: nn.Module, batch: Any) -> Any:
        given: tuple[Any, ...] = (batch,)
        named: dict[str, Any] = {}
        if isinstance(batch, Mapping):
            known = batch if inspect.Parameter.VAR_KEYWORD in kinds else signature.parameters
            given, named = (), {key: value for key, value in batch.items() if key in known}
            if left := [str(key) for key in batch if key not in known]:
                notify(f"{name}.forward takes {signature}, so it does not get {some(left)} of the batches")
        elif isinstance(batch, tuple | list):
            given = tuple(batch[: max(1, len(needed))])
        try:
            signature.bind(*given, **named)
        except TypeError as error:
            raise UsageError(f"{name}.forward takes {signature}, but of the batches: {error}. {HOW}") from None
        return model(*given, **named)

    return call


def rows_of(job: str, model: nn.Module, call: Predict, part: BatchSlice, batch: Any) -> dict[str | int, Any]:
    """Call the model on a batch."""
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
    rows, found = -1, f"a {type(value).__name__}"
    if isinstance(value, Tensor):
        value = gather(value.detach()).cpu()
        found = f"a tensor of {value.dtype} and of shape {tuple(value.shape)}"
        rows = len(value) if value.dim() and not value.is_complex() else -1
    elif isinstance(value, list):
        value = map_tensors(lambda tensor: gather(tensor.detach()).tolist(), value)
        rows, found = len(value), f"a list of length {len(value)}"
    if rows != samples:
        raise UsageError(f"job '{job}' must predict a row for each of {samples} samples, but predicts {found}. {HOW}")
    return value


def merged(pieces: Sequence[Mapping[Any, Any]]) -> dict[Any, Any]:
    """Return the rows of all pieces in one: for each output a tensor, or a list of rows if they form no tensor."""
    names = {tuple(piece): None for piece in pieces}
    if len(names) > 1:
        raise UsageError(f"the outputs are called {' and elsewhere '.join(map(str, names))}. Return the same for all.")
    return {name: _one([piece[name] for piece in pieces]) for name in pieces[0]}


def _one(values: Sequence[Any]) -> Any:
    if isinstance(values[0], Tensor) and len({(rows.dtype, rows.shape[1:]) for rows in values}) == 1:
        return torch.cat(list(values))
    return [row for rows in values for row in rows]
