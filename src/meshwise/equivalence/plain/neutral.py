"""Take dropout and compiled code out of a plain script.

On the ranks, batch norm normalizes the samples of each rank separately. One process repeats this with parts of its
batch. Tested in tests/equivalence/test_plain_scripts.py.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.overrides import TorchFunctionMode

from meshwise.compat.program_calls import put

DROPOUTS: set[Any] = {F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.alpha_dropout, F.feature_alpha_dropout}
DROPOUTS |= {torch.dropout, torch.dropout_}
MODULES = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)
NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


class _NoDropout(TorchFunctionMode):
    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function in DROPOUTS:
            return args[0] if args else kwargs["input"]
        if function is F.scaled_dot_product_attention:
            args, kwargs = (*args[:4], 0.0, *args[5:]) if len(args) > 4 else args, {**(kwargs or {})}
            if "dropout_p" in kwargs:
                kwargs["dropout_p"] = 0.0
        return function(*args, **(kwargs or {}))


def _still(module: nn.Module, inputs: Any) -> None:
    """Set the dropout rate of a module to 0 before its forward. Some modules, e.g. nn.LSTM, run dropout inside a C++
    function, where `_NoDropout` cannot disable it."""
    if isinstance(module, nn.RNNBase | nn.MultiheadAttention):
        module.dropout = 0.0
    elif isinstance(module, MODULES):
        module.p = 0.0


@contextlib.contextmanager
def neutral(rows: Mapping[int, list[int]]) -> Iterator[None]:
    """Make the results of one process and of several ranks comparable, inside the with block. Dropout and torch.compile
    are disabled. Batch norm normalizes the samples of each rank separately, in one process too.

    rows: the size of a batch -> the number of samples of each rank in this batch, e.g. {8: [4, 4]}.
    """
    ends = [
        register_module_forward_pre_hook(_still).remove,
        put([torch], "compile", lambda plain: _uncompiled),
        put([F], "batch_norm", lambda plain: _by_parts(plain, rows)),
    ]
    try:
        with _NoDropout():
            yield
    finally:
        for end in ends:
            end()


def _uncompiled(model: Any = None, **options: Any) -> Any:
    return model if model is not None else lambda function: function


def _by_parts(plain: Callable[..., Tensor], rows: Mapping[int, list[int]]) -> Callable[..., Tensor]:
    inside = False

    def batch_norm(
        input: Tensor,
        running_mean: Tensor | None,
        running_var: Tensor | None,
        weight: Tensor | None = None,
        bias: Tensor | None = None,
        training: bool = False,
        *rest: Any,
        **named: Any,
    ) -> Tensor:
        nonlocal inside  # a mode of torch's functions comes here again, by this name
        parts = _parts(len(input), rows) if training and not inside else []
        found, before, inside = list[Tensor](), inside, True
        try:
            for number, part in enumerate(input.split(parts) if len(parts) > 1 else [input]):
                held = [s if s is None or number == 0 else s.clone() for s in (running_mean, running_var)]  # rank 0's
                found.append(plain(part, *held, weight, bias, training, *rest, **named))
        finally:
            inside = before
        return torch.cat(found) if len(found) > 1 else found[0]

    return batch_norm


def _parts(size: int, rows: Mapping[int, list[int]]) -> list[int]:
    """Return how many rows of a tensor belong to each rank. Example: size 16 and rows {8: [4, 4]} -> [8, 8]. Return an
    empty list if `size` is not a multiple of a batch size in `rows`."""
    for total, parts in rows.items():
        if total and size % total == 0:
            return [part * size // total for part in parts]
    return []
