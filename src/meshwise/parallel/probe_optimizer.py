"""Test on small matrices whether an optimizer works on parameter shards.

The test runs before a plan lets an optimizer step only some parameters, or parts of each parameter.

Most optimizers treat every element separately, and `is_by_numbers` knows those in torch. Others may
compute a norm over all gradients (AdaGC) or over a matrix (LARS), or use the whole matrix (Muon, Shampoo, SOAP): on a
part, their step may differ without an error. So a copy of the optimizer with the same settings steps small parameters
both ways, a few times in float64, and the results must be the same numbers. If it cannot step float64, float32 is used.
The test leaves torch's random generators as they are.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn, optim
from torch.distributed.tensor import DTensor, distribute_tensor

from meshwise.parallel.step_hooks import is_by_numbers
from meshwise.torch_compat.dispatch import is_rehearsed, real_values, rehearsing
from meshwise.torch_compat.modules import is_hooks, step_without_hooks
from meshwise.torch_compat.sharding import local_of
from meshwise.transfer.reading import together
from meshwise.transfer.sharded import full_tensor
from meshwise.transfer.traced import ours

STEPS, MOST_STEPS, ROWS = 8, 128, 31
TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4}
Place = Callable[[Tensor, Any], Tensor]
"""Returns a small test tensor with the device and sharding of a parameter. Called with (test tensor, parameter)."""


def unlike_by_parameters(optimizer: optim.Optimizer) -> str:
    """Return why steps may differ if each rank steps only some of the parameters, or "" if they do not."""
    return "" if is_by_numbers(optimizer) else _unlike(optimizer, _whole, every=2)


def unlike_on_parts(optimizer: optim.Optimizer) -> str:
    """Return why the optimizer may step shards differently from whole parameters, or "" if it does not."""
    return "" if is_by_numbers(optimizer) else _unlike(optimizer, _first_rows if rehearsing() else _divided)


def _whole(value: Tensor, stands_for: Any) -> Tensor:
    return value if is_rehearsed(local_of(stands_for)) else value.to(stands_for.device)


def _first_rows(value: Tensor, stands_for: Any) -> Tensor:
    return value[: len(value) // 2] if value.ndim else value


def _divided(value: Tensor, stands_for: Any) -> Tensor:
    if isinstance(stands_for, DTensor):
        value = distribute_tensor(value, stands_for.device_mesh, stands_for.placements, src_data_rank=None)
    return _whole(value, stands_for)


def _unlike(optimizer: optim.Optimizer, place: Place, every: int = 1) -> str:
    """Return why steps may differ if `place` divides tensors, or if only each `every`-th parameter is stepped."""
    why = ""
    for dtype, tolerance in TOLERANCE.items():
        try:
            with real_values(), torch.random.fork_rng(), torch.enable_grad():
                whole = _stepped(optimizer, dtype, _whole)[::every]
                with together(), ours():
                    other = _stepped(optimizer, dtype, place, every)[::every]
                pairs = [(a.flatten(), full_tensor(b).flatten()) for a, b in zip(whole, other, strict=True)]
                far = max(float((a[: len(b)] - b).abs().max() / a.abs().max().clamp(min=1)) for a, b in pairs)
            return "" if far <= tolerance else f"its results differ by {far:.0e} in a trial on small matrices"
        except Exception as error:  # third-party optimizers may raise anything
            why = why or f"a trial on small matrices raised {error!r:.100}"
    return why


def _stepped(optimizer: optim.Optimizer, dtype: torch.dtype, place: Place, every: int = 1) -> list[Tensor]:
    """Step small random parameters with a copy of `optimizer`, and return them."""
    torch.manual_seed(0)

    def draw(stands_for: Tensor) -> Tensor:
        return place(torch.randn(_small_shape(stands_for), dtype=dtype), stands_for)

    clone, small = _copied(optimizer, draw)
    if hasattr(clone, "train"):  # this is a schedule-free optimizer
        clone.train()
    # Some optimizers behave differently after n steps (n is a setting, 25 in Shampoo): run more than n steps.
    waits = [v for held in (vars(optimizer), *optimizer.param_groups) for v in held.values() if type(v) is int]
    for number in range(max([STEPS, *(wait + 2 for wait in waits if wait + 2 <= MOST_STEPS)])):
        for index, (p, stands_for) in enumerate(small.items()):
            gradient = draw(stands_for) * 10.0 ** (1 - number % 3)
            p.grad = gradient if p.requires_grad and index % every == 0 else None
        step_without_hooks(clone)(clone)
    return [p.detach() for p in small]


def _copied(optimizer: optim.Optimizer, draw: Callable[[Tensor], Tensor]) -> tuple[Any, dict[nn.Parameter, Tensor]]:
    """Return a stateless copy of `optimizer`, and a dict from its test parameters to the real parameters."""
    clone: Any = object.__new__(type(optimizer))
    memo: dict[int, Any] = {id(optimizer): clone, id(optimizer.state): defaultdict(dict)}
    memo |= {id(hooks): {} for name, hooks in vars(optimizer).items() if is_hooks(name)}
    kinds: dict[object, dict[nn.Parameter, Tensor]] = {}
    for group in optimizer.param_groups:
        told, memo[id(group["params"])] = tuple(v for v in group.values() if isinstance(v, bool | str)), []
        for p in group["params"]:
            alike = kinds.setdefault((told, _small_shape(p), p.requires_grad), {})
            if len(alike) < 2:  # for speed, two parameters represent all similar ones
                alike[test := nn.Parameter(draw(p), p.requires_grad)] = p
                memo[id(group["params"])].append(test)
            memo[id(p)] = next(reversed(alike))
    vars(clone).update(copy.deepcopy({k: v for k, v in vars(optimizer).items() if k != "step"}, memo))
    clone.param_groups[:] = [group for group in clone.param_groups if group["params"]]
    return clone, {p: stands_for for alike in kinds.values() for p, stands_for in alike.items()}


def _small_shape(p: Tensor) -> torch.Size:
    """Return the shape of a test parameter. It is tall or wide as `p` is, and cannot be divided evenly."""
    tall = p.ndim < 2 or p.shape[0] >= p.shape[1]
    return torch.Size((ROWS, ROWS - 1 if tall else ROWS + 1, *[2] * (p.ndim - 2))[: p.ndim])
