"""Turn a model's predictions for a batch into rows, one per sample.

Tested in tests/prediction/test_predict.py.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import numpy
import torch
from torch import Tensor, nn

from meshwise.compat.tree import map_tensors
from meshwise.data.order import BatchSlice
from meshwise.prediction.files import Outputs
from meshwise.spec.errors import UsageError
from meshwise.spec.words import some
from meshwise.splits.crossing import gather

Predict = Callable[[nn.Module, Any], Any]
HOW = "Write Job(predict=lambda model, batch: model(...)), or mw.predict(..., predict=...)."


def plain_call(model: nn.Module, notify: Callable[[str], None]) -> Predict:
    """Return a function that calls a model on a batch, with arguments that fit the model's forward.

    A dict is passed as keyword arguments, without the keys that the forward does not take. For a tuple or list, as many
    of its first entries are passed as the forward has required arguments, but at least one entry. Any other batch is
    passed whole. The returned function raises UsageError if a required argument is missing in the batch.

    Call `plain_call` before a plan is applied to `model`, because a plan replaces the forward and hides its arguments.

    notify: called with a note for the user if keys of a dict are left out.
    """
    parameters = list(inspect.signature(model.forward).parameters.values())
    takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters)
    names = [p.name for p in parameters if p.kind in (p.KEYWORD_ONLY, p.POSITIONAL_OR_KEYWORD)]
    needed = [p for p in parameters if p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    asks = f"{type(model).__name__}.forward takes {', '.join(names) or 'no named argument'}"

    def call(model: nn.Module, batch: Any) -> Any:
        if isinstance(batch, Mapping):
            known = {name: value for name, value in batch.items() if takes_all or name in names}
            lacking = [p.name for p in needed if p.name not in known and not takes_all]
            if lacking or not known:
                raise UsageError(f"the keys of the batches are {some(list(map(str, batch)))}, but {asks}. {HOW}")
            if left := [name for name in batch if name not in known]:
                notify(f"{asks}, so the model does not get {some(list(map(str, left)))} of the batches")
            return model(**known)
        if isinstance(batch, tuple | list):
            if len(needed) > len(batch):
                raise UsageError(f"the batches have {len(batch)} parts, but {asks}. {HOW}")
            return model(*batch[: max(1, len(needed))])
        return model(batch)

    return call


def rows_of(result: Any, part: BatchSlice, job: str) -> Outputs:
    """Return the rows of this rank's samples on the host, without padding samples. Collective, since sharded tensors
    are gathered.

    Raises UsageError if `result` does not have a row for each sample.
    """
    size = max(part.samples, 1)
    return {name: _rows(value, size, job)[: part.samples] for name, value in _named(result).items()}


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
    if isinstance(value, Tensor):
        value = gather(value.detach()).cpu()
        found = f"a tensor of shape {tuple(value.shape)}"
        if value.is_complex():
            raise UsageError(f"job '{job}' cannot predict complex numbers. Return torch.view_as_real(out). {HOW}")
    elif isinstance(value, list):
        value = map_tensors(lambda tensor: gather(tensor.detach()).tolist(), value)
        found = f"a list of length {len(value)}"
    else:
        found = f"a {type(value).__name__}"
    if not isinstance(value, Tensor | list) or (isinstance(value, Tensor) and not value.dim()) or len(value) != samples:
        raise UsageError(f"job '{job}' must predict a row for each of {samples} samples, but predicts {found}. {HOW}")
    return value
