"""Key random draws inside a model by step, call and element.

A drawn element is a function of (seed, step, microbatch, call, global element index).

One device draws a dropout mask for the whole microbatch. Under a plan, each rank takes its rows of this same mask.
Draws are intercepted as operators, whatever code calls them: `nn.Dropout`, attention, LSTMs.

    which call it is    known by a number drawn from torch's generator, which every rank seeds equally; recomputation
                        resets that generator, so that a repeated call gets the same mask
    which rows          `meshwise check` knows the shape that one device drew for the call. The dim that is shorter in
                        the same ratio as the rows is the batch dim. Other shorter dims have less padding. A run takes
                        dim 0 or dim 1, if its length is the rank's number of samples

Operators that are not in `DRAWS` (randperm, gamma) draw from torch's generator, which is seeded by the same key. So
every rank draws the same numbers, and if the shape is the same, the numbers that one device draws. A draw of another
shape is reported, and so are draws on DTensors and draws from the program's own generators.
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
from torch.nn.attention import SDPBackend, sdpa_kernel

from meshwise.torch_compat.dispatch import intercept_operators, named_arguments, operator_name, without_interception
from meshwise.torch_compat.tree import tensors_in
from meshwise.training.data.order import BatchSlice
from meshwise.transfer import stages
from meshwise.transfer.splitmix import GOLDEN, mixed, mixed_bits, shifted, signed

Uniform = Callable[[Sequence[int], torch.device], Tensor]
"""A function (shape, device) that returns uniform float64 numbers in [0, 1)."""
Arguments = dict[str, Any]
"""The arguments of an operator by name."""
Draws = Callable[[Uniform, Arguments], Any]


@dataclass(frozen=True)
class Draw:
    """A random draw inside a model: the operator, and the shape of the numbers that it drew."""

    operator: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Rows:
    """The rows of a microbatch that a rank has: `count` rows from row `first` on, of `total` rows on all ranks.

    samples: how many of these rows are samples. It is 0 if the only row is padding.
    """

    first: int
    count: int
    total: int
    samples: int


GENERATOR = " from a generator of the program's own"
DrawLayout = Callable[[int, str, tuple[int, ...]], tuple[tuple[int, ...], int | None] | None]
"""Takes (number of the draw, operator, shape on this rank). Returns (shape on one device, dim divided over the ranks or
None). Returns None if the layout is unknown. The rank then draws independently of other ranks."""


class KeyedDraws:
    """Computes the random numbers of a model's forward, such as dropout masks, from a key and the position of each
    element. This rank gets its rows of the numbers that one device would draw for the whole microbatch.

    key: (seed, step, number of the microbatch).
    rows: the rows of the microbatch that this rank has.
    attention_as_operators: whether to run attention as separate operators. A fused kernel would draw its dropout
    itself.
    """

    def __init__(
        self,
        key: tuple[int, int, int],
        rows: Rows,
        layout: DrawLayout,
        *,
        attention_as_operators: bool = False,
    ) -> None:
        self._key, self._rows, self._layout = key, rows, layout
        self._attention_as_operators = attention_as_operators
        self._calls: dict[int, int] = {}
        self.log: list[Draw] = []
        self.unkeyed: set[str] = set()
        """Random operators that are not computed from `key`. Each rank draws their numbers itself."""

    @contextlib.contextmanager
    def forward(self) -> Iterator[None]:
        """Return a context manager for the forward pass of a microbatch. It seeds torch's generator with `key`, and
        computes the random numbers of the forward."""
        torch.manual_seed(mixed(*self._key))
        with stages.carried(lambda: len(self._calls), self._go_on), self.backward():
            yield

    def _go_on(self, calls: int) -> None:
        """Set the number of the next random draw to `calls`, which is the number of draws that earlier pipeline stages
        have made in this microbatch. Draws then have the same numbers as without a pipeline."""
        with without_interception():
            while len(self._calls) < calls:
                if self._next_call() == len(self.log):
                    self.log.append(Draw("", ()))

    @contextlib.contextmanager
    def backward(self) -> Iterator[None]:
        """Return a context manager for the backward pass of a microbatch. If the backward recomputes the forward, the
        forward draws the same random numbers again."""
        attention = sdpa_kernel(SDPBackend.MATH) if self._attention_as_operators else contextlib.nullcontext()
        with attention, intercept_operators(self._handle):
            yield

    def _handle(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        name = operator_name(func)
        draw = DRAWS.get(name)
        if torch.Tag.nondeterministic_seeded not in func.tags and draw is None:
            return func(*args, **kwargs)
        own = kwargs.get("generator") is not None
        if own or any(isinstance(a, DTensor) for a in args):
            self.unkeyed.add(name + own * GENERATOR)
            return func(*args, **kwargs)
        if name.startswith("_scaled_dot_product"):  # in float64, attention runs as operators in DRAWS instead
            return func(*args, **kwargs)
        call = self._next_call()
        if draw is None:
            return self._from_generator(func, args, kwargs, call)
        given = named_arguments(func, args, kwargs)
        return draw(lambda shape, device: self._uniform(name, tuple(shape), device, call), given)

    def _next_call(self) -> int:
        drawn = int(torch.randint(2**62, ()))
        return self._calls.setdefault(drawn, len(self._calls))

    def _from_generator(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], call: int) -> Any:
        state = torch.get_rng_state()
        torch.manual_seed(mixed(*self._key, call))
        result = func(*args, **kwargs)
        torch.set_rng_state(state)
        shape = tuple(next(tensors_in(result)).shape)
        found = self._placed(operator_name(func), shape, call)
        if found is not None and found[0] != shape:
            self.unkeyed.add(f"{operator_name(func)} of shape {shape}")
        return result

    def _placed(self, name: str, shape: tuple[int, ...], call: int) -> tuple[tuple[int, ...], int | None] | None:
        """Record a draw, and return its layout (see `DrawLayout`)."""
        if call == len(self.log):
            self.log.append(Draw(name, shape))
        found = self._layout(call, name, shape)
        if found is None:
            self.unkeyed.add(f"{name} of shape {shape}")
        return found

    def _uniform(self, name: str, shape: tuple[int, ...], device: torch.device, call: int) -> Tensor:
        whole, dim = self._placed(name, shape, call) or (shape, None)
        values = keyed_uniform(mixed(*self._key, call), whole, device)
        if dim is None:
            return values
        size, rows = shape[dim], self._rows
        # A part that is all padding could begin past the end, so limit `first`.
        first = min(rows.first * size // rows.count, whole[dim] - size)
        return values.narrow(dim, first, size)[tuple(map(slice, shape))]


class ExactDraws:
    """Makes the random draws of a run independent of the number of devices."""

    def __init__(self) -> None:
        self.unkeyed: set[str] = set()

    def of_microbatch(self, key: tuple[int, int, int], part: BatchSlice) -> KeyedDraws:
        """Return the draws for this rank's samples of a microbatch, keyed by `key`."""
        rows = Rows(part.first, len(part.indices), part.micro, part.samples)
        draws = KeyedDraws(key, rows, by_rows(rows), attention_as_operators=True)
        draws.unkeyed = self.unkeyed
        return draws

    def note(self) -> str:
        """Return a note for the user on the operators in `unkeyed`; "" if there are none."""
        names = ", ".join(sorted(self.unkeyed))
        return names and f"--exact-random: {names} cannot be seeded per sample, so the ranks draw different numbers."


def on_one_device(call: int, operator: str, shape: tuple[int, ...]) -> tuple[tuple[int, ...], None]:
    """Return the layout of a draw on a rank that has all rows of the batch: the shape itself, and no divided dim. Takes
    the arguments of a `DrawLayout`."""
    return shape, None


def by_reference(reference: Sequence[Draw], rows: Rows) -> DrawLayout:
    """Return a `DrawLayout` that takes the shapes on one device from a reference run.

    The batch dim is the first dim that is shorter on this rank by the rank's fraction of the rows, e.g. a quarter for 2
    of 8 rows. Other dims may be shorter because this rank's rows have less padding. The rank then uses the first
    numbers along these dims. The layout is unknown if the reference run has another draw at this point."""

    def layout(call: int, operator: str, shape: tuple[int, ...]) -> tuple[tuple[int, ...], int | None] | None:
        if call >= len(reference) or reference[call].operator != operator:
            return None
        whole = reference[call].shape
        if whole == shape or len(whole) != len(shape):
            return (whole, None) if whole == shape else None
        other = [d for d, (size, own) in enumerate(zip(whole, shape, strict=True)) if size != own]
        batch = [d for d in other if whole[d] * rows.count == shape[d] * rows.total][:1]
        return (whole, batch[0]) if batch and all(shape[d] < whole[d] for d in other) else None

    return layout


def by_rows(rows: Rows) -> DrawLayout:
    """Return a `DrawLayout` that guesses the batch dim from the shape, without a reference run.

    The batch dim is dim 0 or dim 1, if its length is the number of this rank's rows. If neither fits, it is dim 0, if
    its length is a multiple of that number, e.g. samples x heads. A single number has no batch dim, and is the same on
    all ranks. For any other shape the layout is unknown."""

    def layout(call: int, operator: str, shape: tuple[int, ...]) -> tuple[tuple[int, ...], int | None] | None:
        dims = [d for d in range(min(2, len(shape))) if shape[d] == rows.count]
        dims += [0] if shape and shape[0] % rows.count == 0 else []
        if not dims:
            return (shape, None) if math.prod(shape) == 1 else None  # all samples share one number
        whole = list(shape)
        whole[dims[0]] = shape[dims[0]] // rows.count * rows.total
        return tuple(whole), dims[0]

    return layout


def keyed_uniform(key: int, shape: Sequence[int], device: torch.device) -> Tensor:
    """Return uniform float64 numbers in [0, 1). Element i depends only on (key, i).

    The finalizer of SplitMix64, applied twice, makes the bits. The upper 53 bits are used.
    """
    bits = torch.arange(1, math.prod(shape) + 1, dtype=torch.int64, device=device) * signed(GOLDEN)
    bits = mixed_bits(mixed_bits(bits + signed(key * 2**31)))
    values: Tensor = shifted(bits, 11).to(torch.float64).mul(2.0**-53)
    return values.view(tuple(shape))


def keyed_normal(key: int, shape: Sequence[int], device: torch.device) -> Tensor:
    """Return normally distributed float64 numbers. Element i depends only on (key, i)."""
    return _normal(keyed_uniform(key, shape, device))


def _bernoulli(uniform: Uniform, given: Arguments) -> Any:
    tensor: Tensor = given["self"]
    return (uniform(tensor.shape, tensor.device) < given.get("p", tensor)).to(tensor.dtype)


def _native_dropout(uniform: Uniform, given: Arguments) -> tuple[Tensor, Tensor]:
    tensor, chance = given["input"], given["p"]
    if given["train"] is False:
        return tensor.clone(), torch.ones_like(tensor, dtype=torch.bool)
    mask = uniform(tensor.shape, tensor.device) >= chance
    return tensor * mask * (0.0 if chance == 1 else 1 / (1 - chance)), mask


def _multinomial(uniform: Uniform, given: Arguments) -> Tensor:
    chances, count = given["self"].double(), given["num_samples"]
    if given["replacement"]:
        below = chances.cumsum(-1)
        u = uniform((*chances.shape[:-1], count), chances.device) * below[..., -1:]
        return torch.searchsorted(below, u, right=True).clamp(max=chances.shape[-1] - 1)
    waits = -torch.log1p(-uniform(chances.shape, chances.device))  # exponential race: the smallest waits / chances win
    picked: Tensor = (chances / waits.clamp(min=2.0**-54)).topk(count).indices
    return picked


def _random_normal(uniform: Uniform, given: Arguments) -> Tensor:
    """Implement torch.normal, both for a mean and std given as numbers and for tensors."""
    mean, std = given["mean"], given["std"]
    if "size" in given:
        like = torch.empty(given["size"], dtype=given["dtype"], device=given["device"])
    else:
        like = torch.as_tensor(mean) + torch.as_tensor(std)
    drawn: Tensor = mean + std * _normal(uniform(like.shape, like.device))
    return drawn.to(like.dtype)


def _whole_numbers(uniform: Tensor, given: Arguments) -> Tensor:
    """Convert uniform numbers in [0, 1) to integers from `low` up to, but not including, `high`."""
    low: Any = given.get("low", given.get("from", 0))
    high: Any = given["high"] if "high" in given else given.get("to")
    whole: Tensor = low + (uniform * ((2**24 if high is None else high) - low)).floor()
    return whole


def _normal(uniform: Tensor) -> Tensor:
    normal: Tensor = torch.special.ndtri(uniform.clamp(2.0**-54, 1 - 2.0**-53))
    return normal


def _in_place(turn: Callable[[Tensor, Arguments], Tensor]) -> Draws:
    """Return a function that computes a random in-place operator, such as `normal_`, from uniform random numbers."""

    def draw(uniform: Uniform, given: Arguments) -> Any:
        tensor = given["self"]
        return tensor.copy_(turn(uniform(tensor.shape, tensor.device), given))

    return draw


def _new(turn: Callable[[Tensor, Arguments], Tensor]) -> Draws:
    """Return a function that computes the new tensor of a random operator, such as `randn`, from uniform random
    numbers."""

    def draw(uniform: Uniform, given: Arguments) -> Tensor:
        like: Tensor = given["self"] if "self" in given else torch.empty(0, device="cpu")
        values = turn(uniform(given.get("size", like.shape), torch.device(given["device"] or like.device)), given)
        dtype = given["dtype"] or like.dtype
        # The default dtype of `randint` is the number 4, which means int64.
        return values.to(dtype if isinstance(dtype, torch.dtype) else torch.int64)

    return draw


DRAWS: dict[str, Draws] = {
    "bernoulli_": _in_place(lambda u, given: u < given["p"]),
    "bernoulli": _bernoulli,
    "native_dropout": _native_dropout,
    "uniform_": _in_place(lambda u, given: given["from"] + (given["to"] - given["from"]) * u),
    "normal_": _in_place(lambda u, given: given["mean"] + given["std"] * _normal(u)),
    "exponential_": _in_place(lambda u, given: -torch.log1p(-u) / given["lambd"]),
    "random_": _in_place(_whole_numbers),
    "rand": _new(lambda u, given: u),
    "randn": _new(lambda u, given: _normal(u)),
    "rand_like": _new(lambda u, given: u),
    "randn_like": _new(lambda u, given: _normal(u)),
    "randint": _new(_whole_numbers),
    "randint_like": _new(_whole_numbers),
    "normal": _random_normal,
    "multinomial": _multinomial,
}
"""For each random operator, a function that computes its result from uniform random numbers."""
