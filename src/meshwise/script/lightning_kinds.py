"""Find how a logged value depends on the rows of its batch.

It may be a mean, a sum, the largest or smallest value, depend on parameters alone, or be something else. Calls of torch
functions are watched, in the first batch only, as a step without gradients leaves no graph. Tested in
tests/script/test_lightning.py.
"""

from __future__ import annotations

import inspect
from typing import Any

from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakIdKeyDictionary

from meshwise.compat.torch_function import called
from meshwise.compat.tree import tensors_in

MEAN, SUM, MAX, MIN, SAME, OTHER = "mean", "sum", "max", "min", "same", "other"
LIKE = {
    "clone",
    "detach",
    "float",
    "double",
    "half",
    "to",
    "type_as",
    "reshape",
    "view",
    "squeeze",
    "cpu",
    "item",
}
REDUCED = {"mean": MEAN, "nanmean": MEAN, "sum": SUM, "count_nonzero": SUM, "max": MAX, "amax": MAX, "min": MIN,
           "amin": MIN}  # fmt: skip
ADDED, FACTORS = {"add", "sub", "rsub"}, {"mul", "div", "true_divide"}


class Kinds(TorchFunctionMode):
    """While this mode is active, it records how each scalar tensor is computed. `of` then returns how the scalar
    depends on the rows of the batch."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        self._rows = rows
        self._made: dict[int, tuple[Tensor, str]] = {}  # numbers, and stacks of them
        self._still = WeakIdKeyDictionary()  # tensors that are of parameters alone

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if isinstance(result, Tensor):
            self._keep(result, func, args, kwargs)
        return result

    def of(self, value: Tensor) -> str:
        """Return how a scalar depends on the rows of the batch: MEAN, SUM, MAX, MIN, SAME or OTHER. SAME means that it
        does not depend on this rank's rows, or that it covers the rows of all ranks."""
        made = self._made.get(id(value))
        return SAME if made is None else made[1]

    def is_whole(self, value: Tensor) -> None:
        """Record that a scalar has been computed from the rows of all ranks. `Kinds.of` then returns SAME for this
        scalar."""
        self._made[id(value)] = value, SAME

    def _keep(self, result: Tensor, func: Any, args: Any, kwargs: Any) -> None:
        given = list(tensors_in((args, kwargs)))
        still = all(isinstance(each, nn.Parameter) or each in self._still for each in given) and bool(given)
        if still:
            self._still[result] = True
        if result.ndim == 0:
            self._made[id(result)] = result, SAME if still else self._kind(func, args, kwargs, given)
        elif result.ndim == 1 and called(func) in ("stack", "cat") and all(each.ndim == 0 for each in given):
            self._made[id(result)] = result, _together([self.of(each) for each in given])

    def _kind(self, func: Any, args: Any, kwargs: Any, given: list[Tensor]) -> str:
        name = called(func).strip("_")
        if (said := _reduction(func, args, kwargs)) is not None:
            return SUM if said == "sum" else MEAN
        if not given:
            return SAME
        if id(given[0]) in self._made and (name in LIKE or name in REDUCED):
            return self.of(given[0])
        if name == "neg":
            return {MAX: MIN, MIN: MAX}.get(self.of(given[0]), self.of(given[0]))
        if name in REDUCED:
            return REDUCED[name] if name != "mean" or given[0].numel() % max(self._rows, 1) == 0 else OTHER
        if any(each.ndim for each in given):
            return OTHER
        kinds = [self.of(each) for each in given]
        if name in ADDED:
            return _together(kinds)
        if name in FACTORS:
            return self._divided(name, args, kinds)
        return SAME if set(kinds) == {SAME} else OTHER

    def _divided(self, name: str, args: Any, kinds: list[str]) -> str:
        kind = _together(kinds)
        if "div" not in name or SUM not in kinds:
            return kind
        below = float(args[1])
        whole = below >= self._rows and below % max(self._rows, 1) == 0
        return MEAN if kinds[0] == SUM and whole else OTHER if kinds.count(SUM) > 1 else kind


def _together(kinds: list[str]) -> str:
    found = {kind for kind in kinds if kind != SAME}
    return SAME if not found else found.pop() if len(found) == 1 and not found & {MAX, MIN} else OTHER


def _reduction(func: Any, args: Any, kwargs: Any) -> str | None:
    """Return the argument `reduction` of a call of one of torch's loss functions. Return None for other functions."""
    if not str(getattr(func, "__module__", "")).startswith("torch.nn.functional"):
        return None
    try:
        given = inspect.signature(func).bind(*args, **kwargs)
    except (TypeError, ValueError):
        return None
    given.apply_defaults()
    said = given.arguments.get("reduction")
    return said if isinstance(said, str) else None
