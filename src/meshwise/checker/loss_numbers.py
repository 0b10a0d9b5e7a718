"""Trace the numbers that a loss is made of, with source lines.

The trace tells which of them are means over samples, and which are sums.

The number on one device may be the mean of the ranks' numbers weighted by samples, their sum, or equal to each of
them. The first number that is none of these is where the loss stops being a mean.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from meshwise.spec.user_code import user_place
from meshwise.torch_compat.dispatch import intercept_operators, operator_name

Key = tuple[str, str, int]
"""The source line, the operator, and how many times that line has called the operator before."""
MEANS = ("mse_loss", "smooth_l1_loss", "huber_loss", "binary_cross_entropy", "binary_cross_entropy_with_logits")
COUNTED = ("nll_loss_forward", "nll_loss2d_forward")
"""Losses whose second result is the number of elements (or their total weight) over which they take the mean."""


@dataclass(frozen=True)
class Number:
    """A scalar that occurs in the computation of a loss."""

    value: float
    made_of: tuple[Key, ...]
    over: float = 0.0


Numbers = dict[Key, Number]


class NotedNumbers:
    """Records the scalars of a forward pass. `of` returns those that a loss is computed from."""

    def __init__(self) -> None:
        self._numbers: Numbers = {}
        self._keys: dict[int, tuple[Key, Tensor]] = {}  # tensor id -> key, and the tensor, so that its id stays unique
        self._calls: Counter[tuple[str, str]] = Counter()

    def noting(self) -> AbstractContextManager[Any]:
        """Record the scalars that operators return inside the with block, in the order of the calls."""
        return intercept_operators(self._note)

    def _note(self, operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        result = operator(*args, **kwargs)
        number = result[0] if isinstance(result, tuple) and result else result
        if type(number) is Tensor and not (number.dim() or number.is_complex() or number.is_meta):  # a readable scalar
            name, at = operator_name(operator), user_place()
            if name.startswith(("empty", "new_empty", "random")):  # such as the seed of a loader
                return result
            self._calls[at, name] += 1
            key = at, name, self._calls[at, name]
            made_of = tuple(self._keys[id(arg)][0] for arg in args if id(arg) in self._keys)
            self._numbers[key] = Number(float(number.detach()), made_of, _over(name, args, result))
            self._keys[id(number)] = key, number
        return result

    def of(self, loss: Tensor) -> Numbers:
        """Return the scalars that `loss` is computed from, and `loss` itself as the last."""
        wanted = {self._keys[id(loss)][0]} if id(loss) in self._keys else set()
        for key in reversed(self._numbers):
            if key in wanted:
                wanted.update(self._numbers[key].made_of)
        return {key: number for key, number in self._numbers.items() if key in wanted}

    def since_then(self) -> Numbers:
        """Return the scalars of all operators since the last call, and forget them."""
        found, self._numbers, self._keys, self._calls = self._numbers, {}, {}, Counter()
        return found


def _over(name: str, args: tuple[Any, ...], result: Any) -> float:
    if name == "div" and not (isinstance(args[1], Tensor) and args[1].requires_grad):
        return float(args[1])
    if name in COUNTED:
        return float(result[1])
    return float(args[0].numel()) if name == "mean" or name in MEANS else 0.0


@dataclass(frozen=True)
class Joined:
    """One scalar in the computation of a loss, on one device and on each rank."""

    key: Key
    one: Number
    ranks: tuple[Number, ...]
    samples: tuple[int, ...]

    @property
    def place(self) -> str:
        """The source line that computes the scalar, e.g. "train.py:31"."""
        return self.key[0]

    @property
    def is_mean(self) -> bool:
        """Whether the scalar is the mean of the ranks' scalars, weighted by their samples."""
        return _near(self.weighed(self.samples), self.one.value * sum(self.samples))

    @property
    def is_sum(self) -> bool:
        """Whether the scalar on one device is the sum of the ranks' scalars."""
        return _near(sum(number.value for number in self.ranks), self.one.value)

    @property
    def is_alike(self) -> bool:
        """Whether the scalar has the same value on every rank as on one device."""
        return all(_near(number.value, self.one.value) for number in self.ranks)

    @property
    def is_mean_of_its_own(self) -> bool:
        """Whether the scalar is the mean weighted by what each rank divides by, such as tokens."""
        over = [number.over for number in self.ranks]
        return (
            min(over) > 0 and _near(sum(over), self.one.over) and _near(self.weighed(over), self.one.value * sum(over))
        )

    @property
    def shown(self) -> str:
        """A phrase that lists the scalar's value on one device and on each rank."""
        ranks = ", ".join(f"{number.value:.6g}" for number in self.ranks)
        return f"{self.one.value:.6g} on one device and {ranks} on the ranks"

    def weighed(self, weights: Sequence[float]) -> float:
        """Multiply the scalar of each rank by the rank's weight, and return the sum."""
        return sum(weight * number.value for weight, number in zip(weights, self.ranks, strict=False))


def joined(one: Numbers, ranks: Sequence[Numbers], samples: Sequence[int]) -> dict[Key, Joined]:
    """Pair each scalar of a loss on one device with the same scalar on each rank."""
    sides = [Counter((at, name) for at, name, _ in side) for side in (one, *ranks)]
    found = {}
    for key, number in one.items():
        if key[0] and all(side[key[:2]] == sides[0][key[:2]] for side in sides):
            found[key] = Joined(key, number, tuple(rank[key] for rank in ranks), tuple(samples))
    last = [next(reversed(side)) for side in (one, *ranks) if side]
    if len(last) == 1 + len(ranks) and all(key[:2] == last[0][:2] for key in last):
        losses = tuple(rank[key] for rank, key in zip(ranks, last[1:], strict=True))
        found[last[0]] = Joined(last[0], one[last[0]], losses, tuple(samples))
    return found


def _near(a: float, b: float) -> bool:
    return abs(a - b) <= 1e-9 * max(abs(a), abs(b), 1e-300)
