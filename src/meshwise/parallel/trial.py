"""Test on small matrices whether an optimizer works on parameter shards.

The test runs before a plan lets an optimizer step only some parameters, or parts of each parameter.

Most optimizers treat every element separately, and those of torch that do are known (`BY_NUMBERS`). Other optimizers
may compute a norm over all gradients (AdaGC) or over a matrix (LARS), or use the whole matrix (Muon, Shampoo, SOAP): on
a part, their step may differ without an error. So a copy of the optimizer with the same settings steps small parameters
both ways, a few times in float64, and the results must be the same numbers. The test does not change the program's
random generators.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import random
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy
import torch
from torch import Tensor, nn, optim
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import Optimizer

from meshwise.compat.fake import is_rehearsed, real_values, rehearsing
from meshwise.compat.optimizers import is_hooks, step_without_hooks
from meshwise.compat.sharding import local_of
from meshwise.transfer import foreign
from meshwise.transfer.reading import together
from meshwise.transfer.sharded import full_tensor

_KNOWN: list[type[Any]] = [
    optim.Adadelta,
    optim.Adagrad,
    optim.Adam,
    optim.AdamW,
    optim.Adamax,
    optim.ASGD,
    optim.NAdam,
    optim.RAdam,
    optim.RMSprop,
    optim.SGD,
    optim.SparseAdam,
]
BY_NUMBERS = {inspect.unwrap(kind.step) for kind in _KNOWN}
STEPS, MOST_STEPS = 8, 128
TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4}
ROWS, COLUMNS = 5, 3
Place = Callable[[Tensor, Tensor], Tensor]
"""Returns a small test tensor with the device and sharding of a parameter. Called with (test tensor, parameter)."""
Reached = Callable[[int], bool]
"""Called with the index of a test parameter. Returns whether `_stepped` gives this parameter a gradient."""


def is_by_numbers(optimizer: Optimizer) -> bool:
    """Return whether the optimizer is known to update every element independently of the other elements."""
    return _is_by_numbers(type(optimizer).step)


@functools.cache
def _is_by_numbers(step: Any) -> bool:
    return inspect.unwrap(step) in BY_NUMBERS


def unlike_by_parameters(optimizer: Optimizer) -> str:
    """Find out whether the optimizer computes the same values if each rank steps only some of the parameters. Return
    the reason why it may not. Return an empty string if the values are the same."""
    return "" if is_by_numbers(optimizer) else _first_that_runs(optimizer, _by_parameters)


def unlike_on_parts(optimizer: Optimizer) -> str:
    """Return why the optimizer may compute other values if it steps parameter shards instead of whole parameters.
    Return an empty string if it computes the same values. Collective."""
    return "" if is_by_numbers(optimizer) else _first_that_runs(optimizer, _on_rows if rehearsing() else _on_parts)


def _first_that_runs(optimizer: Optimizer, compare: Callable[[Optimizer, torch.dtype], str]) -> str:
    why = ""
    for dtype in TOLERANCE:
        try:
            with real_values(), _own_random_numbers(), torch.enable_grad():
                return compare(optimizer, dtype)
        except Exception as error:  # whatever an optimizer of others raises
            first = str(error).strip().partition("\n")[0][:100]
            why = why or f"a trial on small matrices raised {type(error).__name__}: {first}"
    return why


def _by_parameters(optimizer: Optimizer, dtype: torch.dtype) -> str:
    whole = _stepped(optimizer, dtype, _as_it_is, lambda number: True)
    even = _stepped(optimizer, dtype, _as_it_is, lambda number: number % 2 == 0)
    odd = _stepped(optimizer, dtype, _as_it_is, lambda number: number % 2 == 1)
    return _difference(whole, [(even, odd)[number % 2][number] for number in range(len(whole))], dtype)


def _on_parts(optimizer: Optimizer, dtype: torch.dtype) -> str:
    whole = _stepped(optimizer, dtype, _as_it_is, lambda number: True)
    with together(), foreign.ours():
        parts = _stepped(optimizer, dtype, _divided, lambda number: True)
        return _difference(whole, [full_tensor(part) for part in parts], dtype)


def _on_rows(optimizer: Optimizer, dtype: torch.dtype) -> str:
    """Return why the optimizer may compute other values if a rank has only some rows of a parameter. Return an empty
    string if the values are the same.

    The optimizer steps small test parameters. It then steps them again with other values in the second half of their
    rows. The first half of the rows must get the same values both times. This test runs on one rank, so it is used in a
    rehearsal, where the other ranks are simulated.
    """
    every = [_stepped(optimizer, dtype, place, lambda number: True) for place in (_as_it_is, _among_other_rows)]
    whole, other = ([p[: len(p) // 2] for p in found if p.ndim] for found in every)
    return _difference(whole, other, dtype)


def _among_other_rows(value: Tensor, stands_for: Tensor) -> Tensor:
    half = len(value) // 2 if value.ndim else 0
    return torch.cat([value[:half], value[half:] * 3]) if half else value


def _difference(whole: Sequence[Tensor], other: Sequence[Tensor], dtype: torch.dtype) -> str:
    far = max((float((a - b).abs().max() / a.abs().max().clamp(min=1)) for a, b in zip(whole, other, strict=True)))
    return "" if far <= TOLERANCE[dtype] else f"its results differ by {far:.0e} in a trial on small matrices"


def _as_it_is(value: Tensor, stands_for: Tensor) -> Tensor:
    return value if is_rehearsed(local_of(stands_for)) else value.to(stands_for.device)


def _divided(value: Tensor, stands_for: Any) -> Tensor:
    if not isinstance(stands_for, DTensor):
        return _as_it_is(value, stands_for)
    there = distribute_tensor(value, stands_for.device_mesh, stands_for.placements, src_data_rank=None)
    return there if there.device == stands_for.device else there.to(stands_for.device)


def _stepped(optimizer: Optimizer, dtype: torch.dtype, place: Place, reached: Reached) -> list[Tensor]:
    """Step small random parameters several times with a copy of `optimizer`, and return these parameters. The caller
    compares the results of two calls.

    place: changes a parameter or gradient for this call, e.g. divides it over the ranks.
    reached: decides which parameters get a gradient.
    """
    torch.manual_seed(0)
    numbers = torch.Generator().manual_seed(1)

    def drawn(shape: torch.Size) -> Tensor:
        return torch.randn(shape, dtype=dtype, generator=numbers)

    clone, small = _copied(optimizer, lambda p: nn.Parameter(place(drawn(_small_shape(p)), p), p.requires_grad))
    switches = callable(getattr(clone, "train", None)) and callable(getattr(clone, "eval", None))
    if switches:  # a schedule-free one
        clone.train()
    step = step_without_hooks(clone)
    for number in range(_steps(optimizer)):
        for index, (p, stands_for) in enumerate(small):
            gradient = place(drawn(p.shape) * 10.0 ** (1 - number % 3), stands_for)
            p.grad = gradient if p.requires_grad and reached(index) else None
        step(clone)
    if switches:
        clone.eval()
    return [p.detach() for p, _ in small]


def _steps(optimizer: Optimizer) -> int:
    """Return how many steps a trial takes. An optimizer may begin something only after some steps, as Shampoo does at
    step 25. So the number of steps is larger than every whole number in the optimizer's settings. Settings above
    MOST_STEPS - 2 are ignored."""
    values = [value for settings in (vars(optimizer), *optimizer.param_groups) for value in settings.values()]
    waits = [value for value in values if type(value) is int and value <= MOST_STEPS - 2]
    return max([STEPS, *(wait + 2 for wait in waits)])


def _copied(
    optimizer: Optimizer, small_of: Callable[[Tensor], nn.Parameter]
) -> tuple[Any, list[tuple[nn.Parameter, Tensor]]]:
    """Return a copy of the optimizer for a trial, and the pairs (test parameter, real parameter that it stands for).
    The copy has no state, and has the small test parameters in place of the real ones.

    A trial must be fast, so at most two test parameters stand for all parameters that are alike. Parameters are alike
    if they have the same `_small_shape` and `requires_grad`, and their groups have the same settings of type bool and
    str.

    small_of: makes a test parameter for a real parameter.
    """
    clone: Any = object.__new__(type(optimizer))
    memo: dict[int, Any] = {id(optimizer): clone}
    kinds: dict[object, list[nn.Parameter]] = {}
    small: list[tuple[nn.Parameter, Tensor]] = []
    for group in optimizer.param_groups:
        told = tuple((k, v) for k, v in group.items() if isinstance(v, bool | str))
        for p in group["params"]:
            alike = kinds.setdefault((told, _small_shape(p), p.requires_grad), [])
            if len(alike) < 2:
                alike.append(small_of(p))
                small.append((alike[-1], p))
            memo[id(p)] = alike[-1]
    left = {k: v for k, v in vars(optimizer).items() if k not in ("state", "step") and not is_hooks(k)}
    vars(clone).update(copy.deepcopy(left, memo), state=defaultdict(dict))
    vars(clone).update({k: OrderedDict() for k in vars(optimizer) if is_hooks(k)})
    for holder in [clone, *vars(clone).values()]:
        if isinstance(holder, Optimizer):
            _hold_each_once(holder)
    return clone, small


def _hold_each_once(optimizer: Optimizer) -> None:
    held: set[int] = set()
    for group in optimizer.param_groups:
        group["params"] = [p for p in group["params"] if not (id(p) in held or held.add(id(p)))]  # type: ignore[func-returns-value]
    optimizer.param_groups[:] = [group for group in optimizer.param_groups if group["params"]]


def _small_shape(p: Tensor) -> torch.Size:
    """Return the shape of the test parameter for `p`: small, and with as many dims as `p`. The ranks cannot divide the
    first dim evenly. If the first dim of `p` is smaller than its second dim, the same holds for the result."""
    ranks = p.device_mesh.size() if isinstance(p, DTensor) else 1
    tall = p.ndim < 2 or p.shape[0] >= p.shape[1]
    rows, columns = (ROWS * ranks - 1, COLUMNS) if tall else (2 * ranks - 1, 2 * ranks + 2)
    return torch.Size((rows, columns, *[2] * (p.ndim - 2))[: p.ndim])


@contextlib.contextmanager
def _own_random_numbers() -> Iterator[None]:
    before = random.getstate(), numpy.random.get_state()
    with torch.random.fork_rng():
        try:
            yield
        finally:
            random.setstate(before[0])
            numpy.random.set_state(before[1])
