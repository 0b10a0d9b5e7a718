"""Write operator calls as text, and repeat them from the text.

They are repeated with real tensors of the same shapes, strides and dtypes.

Tested in tests/rehearsal/test_measured.py.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from meshwise.compat.dispatch import named_arguments

_WORDS: dict[type, str] = {
    torch.dtype: "dtype",
    torch.layout: "layout",
    torch.memory_format: "memory_format",
}
UNDRAWN = ("workspace", "reserve", "reserveSpace", "philox_seed", "rng_state")
"""Arguments with data that a forward keeps for its backward. Random data can crash the process, as in oneDNN's LSTM. So
`call_of` returns "" if `workspace` is a tensor, or if any of the other arguments is a tensor with elements."""
LEAST, MOST = 0.1, 1.0
"""The range of random floats in timed calls. Zero, subnormal and negative values make some operators slower."""


def call_of(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    """Return a call of a torch operator as JSON: the operator's name with its overload, and the arguments."""
    given = named_arguments(func, tuple(args), dict(kwargs))
    held = {name: one for name in UNDRAWN if isinstance(one := given.get(name), Tensor)}
    if "workspace" in held or any(one.numel() for one in held.values()):
        return ""
    try:
        return json.dumps([str(func), [_told(one) for one in args], {key: _told(one) for key, one in kwargs.items()}])
    except TypeError:
        return ""


def made(call: str) -> Callable[[], object]:
    """Return a function that repeats an operator call on the CPU. The input tensors are drawn at random now, and used
    in each repetition.

    call: the JSON from `call_of`.

    Raises AttributeError if this version of torch has no such operator.
    """
    name, args, kwargs = json.loads(call)
    operator = torch.ops
    for part in name.split("."):
        operator = getattr(operator, part)
    bound = _indices_below(name, args)
    own = [_remade(one, bound) for one in args]
    named = {key: _remade(one, bound) for key, one in kwargs.items()}
    return lambda: operator(*own, **named)  # type: ignore[operator]


def bytes_of(call: str) -> int:
    """Return the bytes of the tensors that `made(call)` creates."""

    def of(one: Any) -> int:
        if isinstance(one, list):
            return sum(map(of, one))
        if isinstance(one, dict) and "tensor" in one:
            dtype: torch.dtype = getattr(torch, one["dtype"])
            return _extent(one["tensor"], one["strides"]) * dtype.itemsize
        return 0

    _, args, kwargs = json.loads(call)
    return of(args) + of(list(kwargs.values()))


def _told(one: Any) -> Any:
    if isinstance(one, Tensor):
        return {"tensor": list(one.shape), "strides": list(one.stride()), "dtype": str(one.dtype).split(".")[1]}
    if isinstance(one, list | tuple):
        return [_told(each) for each in one]
    if one is None or isinstance(one, bool | int | float | str):
        return one
    if type(one) in _WORDS:
        return {_WORDS[type(one)]: str(one).split(".")[1]}
    if isinstance(one, torch.device):
        return {"device": "cpu"}
    raise TypeError(f"an operator has an argument of type {type(one)}, which cannot be written as JSON")


def _remade(one: Any, bound: int) -> Any:
    if isinstance(one, list):
        return [_remade(each, bound) for each in one]
    if not isinstance(one, dict):
        return one
    if "tensor" in one:
        return _tensor(one["tensor"], one["strides"], getattr(torch, one["dtype"]), bound)
    (word, value), *_ = one.items()
    return torch.device(value) if word == "device" else getattr(torch, value)


def _tensor(shape: list[int], strides: list[int], dtype: torch.dtype, bound: int) -> Tensor:
    extent = _extent(shape, strides)
    if dtype.is_floating_point:
        flat = torch.empty(extent).uniform_(LEAST, MOST).to(dtype)
    elif dtype == torch.bool:
        flat = torch.rand(extent) < 0.5
    elif dtype.is_complex:
        flat = torch.ones(extent, dtype=dtype)
    else:
        flat = torch.randint(0, bound, (extent,), dtype=dtype)
    return flat.as_strided(shape, strides)


def _extent(shape: Sequence[int], strides: Sequence[int]) -> int:
    """Return how many elements of memory a tensor with this shape and these strides spans."""
    if 0 in shape:
        return 0
    return 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))


def _indices_below(name: str, args: Sequence[Any]) -> int:
    """Return a number n."""
    if "embedding_dense_backward" in name:
        return max(int(args[2]), 1)
    first: list[int] = next((one["tensor"] for one in args if isinstance(one, dict) and "tensor" in one), [])
    if "embedding" in name and first:
        return max(first[0], 1)
    if "nll_loss" in name:
        shapes = [one["tensor"] for one in args if isinstance(one, dict) and len(one.get("tensor", ())) > 1]
        return max(shapes[0][1], 1) if shapes else 1
    return max(min(first, default=1), 1)
