"""Measure how far one device and the plan differ.

Numbers and tensors are compared by name. A relative difference above `LIMIT` is a fault.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from meshwise.checker.trace import Named

LIMIT = 1e-9
FLOOR = 1e-3  # a difference is relative to at least this fraction of the largest value of its kind


def ratio(difference: Tensor, scale: Tensor) -> float:
    """Return the largest element of `difference / scale`. Return 0 if nothing differs."""
    if not difference.numel() or not bool((difference != 0).any()):
        return 0.0
    return finite(float((difference / scale).max()))


def largest(tensors: Iterable[Tensor]) -> float:
    """Return the largest finite absolute value in the floating-point tensors. Return 0 if there is none."""
    sizes = (t.abs().masked_fill(~t.isfinite(), 0.0) for t in tensors if t.is_floating_point())
    return max((float(size.max()) for size in sizes if size.numel()), default=0.0)


def apart(mine: Tensor, other: Tensor) -> Tensor:
    """Return `mine - other` by element, with 0 where both are the same infinity or both are NaN."""
    alike = (mine == other) | (mine.isnan() & other.isnan())
    return (mine - other).masked_fill(alike, 0.0)


def finite(value: float) -> float:
    """Return the value, or infinity if it is NaN."""
    return math.inf if math.isnan(value) else value


def precision_of(tensor: Tensor) -> str:
    """Return the lowest precision that holds every value of a float64 tensor exactly."""
    if not tensor.is_floating_point() or not bool((tensor != 0).any()):
        return ""
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        if torch.equal(tensor.to(dtype).double(), tensor):
            return str(dtype).removeprefix("torch.")
    return ""


@dataclass(frozen=True)
class Difference:
    """How much one value differs between one device and the plan."""

    kind: str
    step: int
    name: str
    relative: float
    facts: Mapping[str, Any] = field(default_factory=dict)

    @property
    def fault(self) -> bool:
        return not self.relative <= LIMIT

    @property
    def factor(self) -> float | None:
        """The number by which the plan has multiplied the gradient of one device, e.g. 2.0 if the plan's gradient is
        twice as large. None if no single number explains the difference."""
        factor, rest = self.facts.get("factor", math.nan), self.facts.get("rest", math.nan)
        return float(factor) if rest <= 1e3 * LIMIT and factor != 0 else None


def numbers(kind: str, step: int, mine: Mapping[str, float], others: Mapping[str, float]) -> Iterator[Difference]:
    """Compare two dicts of numbers, and yield a `Difference` for each name in either of them."""
    for name in sorted(mine.keys() | others.keys()):
        one, plan = mine.get(name, math.nan), others.get(name, math.nan)
        alike = one == plan or (name in mine and name in others and math.isnan(one) and math.isnan(plan))
        far = 0.0 if alike else finite(abs(one - plan))
        relative = finite(far / max(abs(one), torch.finfo(torch.float64).tiny)) if far else 0.0
        yield Difference(kind, step, name, relative, {"one device": one, "the plan": plan})


def tensors(
    kind: str,
    step: int,
    mine: Named,
    others: Named,
    *,
    noise: Mapping[str, Tensor] | None = None,
    facts: Callable[[Tensor, Tensor], dict[str, float]] | None = None,
) -> Iterator[Difference]:
    """Compare two dicts of tensors, and yield a `Difference` for each name in either of them."""
    most = largest(mine.values())
    for name in dict.fromkeys([*mine, *others]):
        if name not in mine or name not in others:
            lacks = {"lacking": "one device" if name not in mine else "the plan"}
            yield Difference(kind, step, name, math.inf, lacks)
            continue
        a, b = mine[name].double(), others[name].double()
        if a.shape != b.shape:
            shapes = {"one device": tuple(a.shape), "the plan": tuple(b.shape)}
            yield Difference(kind, step, name, math.inf, shapes)
            continue
        far = apart(a, b).abs()
        if noise and name in noise and noise[name].shape == far.shape:
            far = far.masked_fill(noise[name], 0.0)
        relative = ratio(far, torch.tensor(max(largest([a]), FLOOR * most), dtype=torch.float64))
        more = facts(a, b) if facts is not None and not relative <= LIMIT else {}
        yield Difference(kind, step, name, relative, more)
