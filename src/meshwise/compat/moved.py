"""Count what a torch.distributed operator moves and whether it blocks.

Operators of the namespace `c10d` say by `async_op` whether the caller waits at once; sends, receives and the functional
ones (`_c10d_functional`) never do. Read in torch 2.11, 2.13 and 2.15: `csrc/distributed/c10d/Ops.cpp`,
`csrc/distributed/c10d/Functional.cpp`. On fake tensors torch waits for functional ones at once.

Tested in tests/rehearsal/test_beside.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor

from meshwise.compat.collective_calls import OPERATORS
from meshwise.compat.tree import tensors_in

FUNCTIONAL = {
    "all_reduce": "all-reduce",
    "all_gather_into_tensor": "all-gather",
    "reduce_scatter_tensor": "reduce-scatter",
    "all_to_all_single": "all-to-all",
    "broadcast": "broadcast",
}
WAIT_TENSOR = "wait_tensor"


@dataclass(frozen=True)
class Moved:
    """What one operator of torch.distributed moves between ranks.

    kind: the collective, such as `all-gather`, or `wait`.
    tensors: the tensors that are moved: the input of a scatter or reduce-scatter, the output of a gather or all-gather.
    peer: the group rank to which a send goes, or from which a receive comes; None for other operations.
    beside: whether the operator is asynchronous.
    work: the handle of the operation; None if it has none."""

    kind: str
    tensors: tuple[Tensor, ...]
    group: dist.ProcessGroup | None
    peer: int | None = None
    beside: bool = False
    work: Any = None


def moved_by(operator: Any, arguments: tuple[Any, ...], result: Any) -> Moved | None:
    """Return the tensors that an operator of torch.distributed moves between ranks, as a `Moved`. Return None for any
    other operator."""
    if operator.namespace == "c10d":
        return _of_group(operator, arguments, result)
    if operator.namespace == "_c10d_functional":
        return _functional(operator, arguments, result)
    return None


def _named(operator: Any, arguments: tuple[Any, ...]) -> dict[str, Any]:
    return dict(zip((argument.name for argument in operator._schema.arguments), arguments, strict=False))


def _of_group(operator: Any, arguments: tuple[Any, ...], result: Any) -> Moved | None:
    name = operator._schema.name.removeprefix("c10d::")
    if name not in OPERATORS:
        return None
    kind, moved = OPERATORS[name]
    given = _named(operator, arguments)
    tensors = () if moved is None else tuple(tensors_in(arguments[moved]))
    peer = given["dst"] if kind == "send" else given["src"] if kind == "receive" else None
    beside = kind in ("send", "receive") or bool(given.get("async_op", True))
    found = result[-1] if isinstance(result, list | tuple) else result
    work = dist.Work.unbox(found) if isinstance(found, torch.ScriptObject) else None
    return Moved(kind, tensors, dist.ProcessGroup.unbox(given["process_group"]), peer, beside, work)


def _functional(operator: Any, arguments: tuple[Any, ...], result: Any) -> Moved | None:
    name = operator._schema.name.removeprefix("_c10d_functional::")
    if name == WAIT_TENSOR:
        return Moved("wait", (), None)
    kind = FUNCTIONAL.get(name.removesuffix("_").removesuffix("_out").removesuffix("_coalesced"))
    if kind is None:
        return None
    named = _named(operator, arguments)["group_name"]
    resolve: Any = dist.distributed_c10d._resolve_process_group  # type: ignore[attr-defined]
    group = resolve(named) if isinstance(named, str) else named
    full = result if kind == "all-gather" else arguments[0]
    return Moved(kind, tuple(tensors_in(full)), group, None, True)


@contextmanager
def waiting(call: Callable[[Any], None]) -> Iterator[None]:
    """In the block, call `call(work)` before each `work.wait()` of the program for a collective of torch's fake
    backend."""
    kind: Any = torch._C._distributed_c10d.FakeWork
    real = kind.wait

    def wait(work: Any, *arguments: Any, **named: Any) -> Any:
        call(work)
        return real(work, *arguments, **named)

    with patch.object(kind, "wait", wait):
        yield
