"""Keyed draws: a random draw inside a model is a function of (seed, step, microbatch, call, global element index).

One device draws a dropout mask for the whole microbatch; under a plan each rank takes its rows of that same mask. It
works on operators, wherever they are written: `nn.Dropout`, attention, LSTMs.

    which call it is    by a number drawn from torch's generator, which starts alike on every rank; recomputation puts
                        that generator back, so that a repeated call gets the same mask
    which rows          a check knows the shape that one device drew for that call: the dim that differs is the batch; a
                        run takes the first dim, or the second, that has as many rows as the rank has samples

Not covered, and reported: operators that `DRAWS` does not have (multinomial, exponential), draws on DTensors.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from meshwise.compat.dispatch import intercept_operators, operator_name
from meshwise.transfer.splitmix import GOLDEN, mixed, mixed_bits, shifted, signed

Uniform = Callable[[Sequence[int], torch.device], Tensor]
"""Numbers in [0, 1), float64, of a shape on a device."""


@dataclass(frozen=True)
class Draw:
    """One random draw inside a model: the operator, and the shape that it filled."""

    operator: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Rows:
    """A rank's rows of a microbatch: `count` from `first` on, of `total` over all ranks; padding has samples 0."""

    first: int
    count: int
    total: int
    samples: int


DrawLayout = Callable[[int, str, tuple[int, ...]], tuple[tuple[int, ...], int | None] | None]
"""(call, operator, shape) -> the shape of the draw on one device, and the dim of it of which this rank has a part, None
where it has all. None: not known, and the rank draws on its own."""


class KeyedDraws:
    """The random draws of one microbatch, of which this rank has `rows`."""

    def __init__(self, key: tuple[int, int, int], rows: Rows, layout: DrawLayout) -> None:
        self._key, self._rows, self._layout = key, rows, layout
        self._calls: dict[int, int] = {}
        self.log: list[Draw] = []
        self.unkeyed: set[str] = set()

    @contextlib.contextmanager
    def forward(self) -> Iterator[None]:
        """The forward of this microbatch: torch's generator starts at its key."""
        torch.manual_seed(mixed(*self._key))
        with self.backward():
            yield

    @contextlib.contextmanager
    def backward(self) -> Iterator[None]:
        """Its backward, which may recompute parts of the forward."""
        with intercept_operators(self._handle):
            yield

    def _handle(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        name = operator_name(func)
        draw = DRAWS.get(name)
        if draw is None or kwargs.get("generator") is not None or any(isinstance(a, DTensor) for a in args):
            if torch.Tag.nondeterministic_seeded in func.tags and not name.startswith("_scaled_dot_product"):
                self.unkeyed.add(name)  # attention that draws is taken apart in float64, into operators of DRAWS
            return func(*args, **kwargs)
        return draw(lambda shape, device: self._uniform(name, tuple(shape), device), args, kwargs)

    def _uniform(self, name: str, shape: tuple[int, ...], device: torch.device) -> Tensor:
        drawn = int(torch.randint(2**62, ()))
        call = self._calls.setdefault(drawn, len(self._calls))
        if call == len(self.log):
            self.log.append(Draw(name, shape))
        found = self._layout(call, name, shape)
        if found is None:
            self.unkeyed.add(f"{name} of shape {shape}")
        whole, dim = found or (shape, None)
        values = keyed_uniform(mixed(*self._key, call), whole, device)
        if dim is None:
            return values
        size, rows = shape[dim], self._rows
        first = min(rows.first * size // rows.count, whole[dim] - size)  # a padding sample lies behind the last row
        return values.narrow(dim, first, size)


def on_one_device(call: int, operator: str, shape: tuple[int, ...]) -> tuple[tuple[int, ...], None]:
    """A `DrawLayout`: this rank has all rows."""
    return shape, None


def by_reference(reference: Sequence[Draw], rows: Rows) -> DrawLayout:
    """A `DrawLayout` that knows what one device drew."""

    def layout(call: int, operator: str, shape: tuple[int, ...]) -> tuple[tuple[int, ...], int | None] | None:
        if call >= len(reference) or reference[call].operator != operator:
            return None
        whole = reference[call].shape
        if whole == shape:
            return whole, None
        other = [d for d in range(len(shape)) if len(whole) == len(shape) and whole[d] != shape[d]]
        if len(other) == 1 and whole[other[0]] * rows.count == shape[other[0]] * rows.total:
            return whole, other[0]
        return None

    return layout


def by_rows(rows: Rows) -> DrawLayout:
    """A `DrawLayout` that takes the batch for the first of two dims that has the rank's rows, else for a first that is
    some times them (heads or positions beside the samples). A rank that has all rows draws as one device does."""

    def layout(call: int, operator: str, shape: tuple[int, ...]) -> tuple[tuple[int, ...], int | None] | None:
        dims = [d for d in range(min(2, len(shape))) if shape[d] == rows.count]
        dims += [0] if shape and shape[0] % rows.count == 0 else []
        if not dims:
            return None
        whole = list(shape)
        whole[dims[0]] = shape[dims[0]] // rows.count * rows.total
        return tuple(whole), dims[0]

    return layout


def keyed_uniform(key: int, shape: Sequence[int], device: torch.device) -> Tensor:
    """Uniform numbers in [0, 1), float64: element i is a function of (key, i) alone.

    The finaliser of SplitMix64, twice, and the upper 53 bits.
    """
    bits = torch.arange(1, math.prod(shape) + 1, dtype=torch.int64, device=device) * signed(GOLDEN)
    bits = mixed_bits(mixed_bits(bits + signed(key * 2**31)))
    values: Tensor = shifted(bits, 11).to(torch.float64).mul(2.0**-53)
    return values.view(*shape)


def keyed_normal(key: int, shape: Sequence[int], device: torch.device) -> Tensor:
    """Normal numbers, float64: element i is a function of (key, i) alone."""
    return _normal(keyed_uniform(key, shape, device))


def _bernoulli_(uniform: Uniform, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    tensor: Tensor = args[0]
    chance = args[1] if len(args) > 1 else kwargs.get("p", 0.5)
    filled: Tensor = tensor.copy_(uniform(tensor.shape, tensor.device) < chance)
    return filled


def _bernoulli(uniform: Uniform, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    tensor: Tensor = args[0]
    chance = args[1] if len(args) > 1 else kwargs.get("p", tensor)
    drawn: Tensor = uniform(tensor.shape, tensor.device) < chance
    return drawn.to(tensor.dtype)


def _native_dropout(uniform: Uniform, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Tensor, Tensor]:
    tensor, chance, train = args
    if train is False:
        return tensor.clone(), torch.ones_like(tensor, dtype=torch.bool)
    mask = uniform(tensor.shape, tensor.device) >= chance
    return tensor * mask * (0.0 if chance == 1 else 1 / (1 - chance)), mask


def _uniform_(uniform: Uniform, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    tensor: Tensor = args[0]
    low = args[1] if len(args) > 1 else kwargs.get("from", 0.0)
    high = args[2] if len(args) > 2 else kwargs.get("to", 1.0)
    filled: Tensor = tensor.copy_(low + (high - low) * uniform(tensor.shape, tensor.device))
    return filled


def _normal_(uniform: Uniform, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    tensor: Tensor = args[0]
    mean = args[1] if len(args) > 1 else kwargs.get("mean", 0.0)
    std = args[2] if len(args) > 2 else kwargs.get("std", 1.0)
    filled: Tensor = tensor.copy_(mean + std * _normal(uniform(tensor.shape, tensor.device)))
    return filled


def _normal(uniform: Tensor) -> Tensor:
    normal: Tensor = torch.special.ndtri(uniform.clamp(2.0**-54, 1 - 2.0**-53))
    return normal


def _like(turn: Callable[[Tensor], Tensor]) -> Callable[..., Tensor]:
    def draw(uniform: Uniform, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        like: Tensor = args[0]
        device = torch.device(kwargs.get("device") or like.device)
        return turn(uniform(like.shape, device)).to(kwargs.get("dtype") or like.dtype)

    return draw


def _new(turn: Callable[[Tensor], Tensor]) -> Callable[..., Tensor]:
    def draw(uniform: Uniform, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        device = torch.device(kwargs.get("device") or "cpu")
        return turn(uniform(args[0], device)).to(kwargs.get("dtype") or torch.get_default_dtype())

    return draw


DRAWS: dict[str, Callable[..., Any]] = {
    "bernoulli_": _bernoulli_,
    "bernoulli": _bernoulli,
    "native_dropout": _native_dropout,
    "uniform_": _uniform_,
    "normal_": _normal_,
    "rand": _new(lambda u: u),
    "randn": _new(_normal),
    "rand_like": _like(lambda u: u),
    "randn_like": _like(_normal),
}
"""Operators that draw, by name, and how they draw by key."""
