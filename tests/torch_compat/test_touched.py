"""What an operator reads and writes: each tensor by its name, of operators of every kind."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from meshwise.torch_compat.dispatch import intercept_operators, touched


def touches(program: Callable[[dict[str, Tensor]], Any], **tensors: Tensor) -> set[str]:
    """`reads x`, `writes y`, `writes new` of what the operators of a program touch."""
    found, addresses = set[str](), {tensor.untyped_storage().data_ptr(): name for name, tensor in tensors.items()}

    def handler(operator: Any, args: Any, kwargs: Any) -> Any:
        result = operator(*args, **kwargs)
        for tensor, writes in touched(operator, args, kwargs, result):
            name = addresses.get(tensor.untyped_storage().data_ptr(), "new")
            found.add(f"{'writes' if writes else 'reads'} {name}")
        return result

    with torch.no_grad(), intercept_operators(handler):
        program(tensors)
    return found


def copies_in(tensors: dict[str, Tensor]) -> Any:
    """An operator of `fully_shard`, whose schema does not say that it writes the output that it is given."""
    of = [tensors["x"].flatten()], tensors["y"].flatten(), [16], 16, 0
    return torch.ops.fsdp.all_gather_copy_in(*of)


PROGRAMS: dict[str, tuple[Callable[[dict[str, Tensor]], Any], set[str]]] = {
    "sum": (lambda t: t["x"] + t["y"], {"reads x", "reads y", "writes new"}),
    "in place": (lambda t: t["x"].add_(t["y"]), {"writes x", "reads y"}),
    "out": (lambda t: torch.mul(t["x"], 2, out=t["y"]), {"reads x", "writes y"}),
    "copy": (lambda t: t["x"].copy_(t["y"]), {"writes x", "reads y"}),
    "lists": (lambda t: torch._foreach_add_([t["x"]], [t["y"]]), {"writes x", "reads y"}),
    "view": (lambda t: t["x"].detach().view(-1)[1:][None].t(), set()),
    "view without a name": (lambda t: torch.ops.aten._unsafe_view(t["x"], [16]), set()),
    "view in place": (lambda t: t["x"].t_().resize_(4), set()),
    "shape alone": (lambda t: (torch.empty_like(t["x"]), t["x"].new_empty(3)), set()),
    "shape, filled": (lambda t: torch.zeros_like(t["x"]), {"writes new"}),
    "item": (lambda t: t["x"][0, 0].item(), {"reads x"}),
    "indexed": (lambda t: t["x"].index_put_((torch.tensor([0]),), t["y"][0]), {"writes x", "reads y", "reads new"}),
    "several results": (lambda t: torch.max(t["x"], 0), {"reads x", "writes new"}),
    "operator that hides what it writes": (copies_in, {"reads x", "reads y", "writes y"}),
    "sparse": (lambda t: t["x"].to_sparse(), {"reads x"}),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_an_operator_touches(name: str) -> None:
    program, wanted = PROGRAMS[name]
    assert touches(program, x=torch.ones(4, 4), y=torch.ones(4, 4)) == wanted
