"""Communicate between processes: every collective that meshwise calls.

Collectives run over all ranks or over a group. No other file of meshwise calls a collective.

"All ranks" means the ranks that divide the work on a batch, as set by `divide_among`. Under tensor parallelism, several
ranks work on the same samples, so "all ranks" means this rank and the ranks that work on other samples. `everyone()` is
the group of the whole run.

In a world of one rank, every function returns at once. Otherwise, each call records a span in the timeline and a row in
each open `comm_log`. The span has the number of bytes. The span of a collective over all ranks also has a number, which
is equal on all ranks, since they enter these collectives in the same order. `of` says what is sent, for the report:
"gradients", "batch norm". Tensors of any dtype, layout and size give right results, also under gloo (see
torch_compat/collectives.py). Ranks of a group are numbered within the group. Not covered: the broadcast of initial
values that DDP makes itself.

`direct`: True replaces gloo's all-gather (of two ranks), all-to-all, reduce-scatter and broadcast with sends and
receives where these use more of the link's bandwidth. False leaves them to the backend, as DDP and FSDP2 do.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from meshwise.reports.recorder import current
from meshwise.reports.spans import collective_name
from meshwise.spec.devices import has_streams
from meshwise.torch_compat import collectives as backend
from meshwise.torch_compat.collectives import Group as Group
from meshwise.torch_compat.collectives import Pairs
from meshwise.transfer.comm_log import OPEN, Stopwatch
from meshwise.transfer.groups import DIVIDING, key_of
from meshwise.transfer.groups import device_of as device_of
from meshwise.transfer.groups import divide_among as divide_among
from meshwise.transfer.groups import dividing as dividing
from meshwise.transfer.groups import everyone as everyone
from meshwise.transfer.groups import get_rank as get_rank
from meshwise.transfer.groups import group_key as group_key
from meshwise.transfer.groups import group_of as group_of
from meshwise.transfer.groups import ranks_of as ranks_of
from meshwise.transfer.groups import world_size as world_size
from meshwise.transfer.traced import COUNTERS, EVERYONE, Ends, begin_traced, log, ours
from meshwise.workers import heartbeat
from meshwise.workers.heartbeat import PEERS, enter, leave

_HOST = torch.device("cpu")
entered: Counter[str] = Counter()
"""How many collectives this rank has entered, by `group_key`. All ranks of a group enter them in the same order."""


def all_reduce(tensor: Tensor, op: str = "sum", group: Group = None, *, of: str = "") -> Tensor:
    """Reduce `tensor` over the ranks in place, and return it.

    op: `sum`, `max`, `min` or `product`. The sum of bools is a logical or.
    """
    _run("all-reduce", [tensor], group, functools.partial(backend.all_reduce, tensor, op), of=of)
    return tensor


def begin_sum(tensor: Tensor, *, of: str = "") -> Future[Tensor]:
    """Begin to sum `tensor` over all ranks, in place. The value of the returned future is `tensor`."""
    return _begin_sum(tensor, of, mean=False)


def begin_mean(tensor: Tensor, *, of: str = "") -> Future[Tensor]:
    """Begin to average `tensor`, like `begin_sum`.
    Each rank divides before the sum, so that fp16 does not overflow."""
    return _begin_sum(tensor, of, mean=True)


def sum_now(tensor: Tensor, *, of: str) -> None:
    """Sum `tensor` over all ranks in place, and wait for the result.

    On the CPU this calls the process group directly. The overhead of `begin_sum` and `dist.all_reduce` would take as
    long as the sum of a small tensor.
    """
    group, name, recorder = DIVIDING[0] or dist.group.WORLD, collective_name("all-reduce", of), current()
    if group is None or COUNTERS or OPEN or has_streams(tensor.device) or tensor.dtype not in backend.PLAIN:
        _begin_sum(tensor, of, mean=False).wait()
        return
    key, beat = key_of(DIVIDING[0]), heartbeat.beat
    entered[key] += 1
    at, begun = 0 if beat is None else beat.enter(name, key), recorder.begin_collective(name)
    try:
        group.allreduce([tensor]).wait()
    finally:
        recorder.end_collective(*begun, tensor)
        if beat is not None:
            beat.leave(at)


def _begin_sum(tensor: Tensor, of: str, *, mean: bool) -> Future[Tensor]:
    """Begin a sum or mean over all ranks, and return its future.
    The recorded span ends when the result is there."""
    group = DIVIDING[0]
    size = dist.get_world_size(group) if dist.is_initialized() else 1
    if mean:
        tensor.div_(size)
    if size == 1:
        there: Future[Tensor] = Future()
        there.set_result(tensor)
        return there
    name, key, recorder = collective_name("all-reduce", of), key_of(group), current()
    entered[key] += 1
    beat, begun = enter(name, key), recorder.begin_collective(name)

    def ended(done: Future[object]) -> Tensor:
        recorder.end_collective(*begun, tensor)
        leave(beat)
        done.value()  # raises the backend's error, if there is one
        return tensor

    if COUNTERS or OPEN or tensor.dtype not in backend.PLAIN or not tensor.is_contiguous():
        return begin_traced(tensor, group).then(ended)
    work = dist.all_reduce(tensor.detach(), group=group, async_op=True)
    assert work is not None  # this rank is a member of the group
    future: Future[Tensor] = work.get_future().then(ended)
    return future


def all_reduce_mean(tensor: Tensor, *, of: str = "") -> Tensor:
    """Average `tensor` over all ranks, in place."""
    return all_reduce(tensor, of=of).div_(world_size())


def all_gather(
    tensor: Tensor, group: Group = None, *, out: Tensor | None = None, direct: bool = True, of: str = ""
) -> Tensor:
    """Gather the tensors of all ranks, stacked along a new first dim: the result has shape (ranks, *tensor.shape).

    out: a contiguous tensor for the result.
    """
    into = _out(out, (world_size(group), *tensor.shape), tensor)
    if len(into) == 1:
        return into.copy_(tensor.detach())
    _run("all-gather", [into], group, functools.partial(backend.all_gather, into, tensor, direct=direct), of=of)
    return into


def reduce_scatter(
    tensor: Tensor, op: str = "sum", group: Group = None, *, out: Tensor | None = None, direct: bool = True
) -> Tensor:
    """Reduce `tensor` over the ranks, divide it equally along dim 0, and return this rank's part."""
    shape = (len(tensor) // world_size(group), *tensor.shape[1:])
    into = _out(out, shape, tensor)
    if world_size(group) == 1:
        return into.copy_(tensor.detach())
    _run("reduce-scatter", [tensor], group, functools.partial(backend.reduce_scatter, into, tensor, op, direct=direct))
    return into


def broadcast(tensor: Tensor, source: int = 0, group: Group = None, *, direct: bool = True, of: str = "") -> Tensor:
    """Broadcast `tensor` from rank `source` in place, and return it."""
    call = functools.partial(backend.broadcast, tensor, source, direct=direct)
    _run("broadcast", [tensor], group, call, (source, None), of)
    return tensor


def broadcast_tensors(tensors: Sequence[Tensor], group: Group = None) -> None:
    """Broadcast rank 0's values of all `tensors`, in place. They are recorded as one collective."""

    def each(group: Group) -> None:
        for tensor in tensors:
            backend.broadcast(tensor, 0, group, direct=True)

    if tensors:
        _run("broadcast", tensors, group, each, (0, None))


def all_to_all(tensor: Tensor, group: Group = None, *, out: Tensor | None = None, direct: bool = True) -> Tensor:
    """Send part i of `tensor` along dim 0 to rank i. Part i of the result comes from rank i."""
    into = _out(out, tensor.shape, tensor)
    if world_size(group) == 1:
        return into.copy_(tensor.detach())
    _run("all-to-all", [tensor], group, functools.partial(backend.all_to_all, into, tensor, direct=direct))
    return into


def send(tensor: Tensor, target: int, group: Group = None) -> None:
    """Send `tensor` to rank `target`, which calls `receive`."""
    send_receive([(tensor, target)], [], group, "send", backend.one_way)


def begin_send(tensor: Tensor, target: int, group: Group = None) -> Callable[[], None]:
    """Begin to send `tensor` to rank `target`, which calls `receive`. The returned function waits until it is sent."""
    with ours():
        await_sent = backend.begin_send(tensor, target, group or dividing())

    def wait() -> None:
        # Report the wait: otherwise, this rank could be blamed for a hang.
        beat = _enter(group, "send", ends=(get_rank(group), target))
        await_sent()
        leave(beat)

    return wait


def receive(tensor: Tensor, source: int, group: Group = None) -> Tensor:
    """Receive a tensor from rank `source` into `tensor`, which has the same shape and dtype, and return `tensor`."""
    send_receive([], [(tensor, source)], group, "receive", backend.one_way)
    return tensor


def send_receive(
    sends: Pairs,
    receives: Pairs,
    group: Group = None,
    kind: str = "send-receive",
    carry: Callable[[Pairs, Pairs, Group], None] = backend.send_receive,
) -> None:
    """Send and receive all these (tensor, rank) pairs at once, with the backend function `carry`.

    The recorded size is the number of bytes that this rank sends or receives, whichever is larger.
    """
    own = get_rank(group)
    moved = max(([tensor for tensor, _ in pairs] for pairs in (sends, receives)), key=_bytes)
    target, source = (pairs[0][1] if len(pairs) == 1 else own for pairs in (sends, receives))
    ends = (own, target) if sends else (source, own)
    _run(kind, moved, group, functools.partial(carry, sends, receives), ends)


def barrier(group: Group = None) -> None:
    """Wait until every rank has called this."""
    _run("barrier", [], group, dist.barrier)


def gather_objects(value: Any, group: Group = None) -> list[Any]:
    """Return the `value` of every rank, in rank order.
    A value may be anything that pickle accepts."""
    parts: list[Any] = [value] * world_size(group)
    if len(parts) > 1:
        with recorded("all-gather", 0, group, "main"):
            dist.all_gather_object(parts, value, group=group or dividing())
    return parts


def broadcast_object(value: Any, group: Group = None) -> Any:
    """Return rank 0's `value` on every rank."""
    box = [value]
    if world_size(group) > 1:
        with recorded("broadcast", 0, group, "main"):
            dist.broadcast_object_list(box, group_src=0, group=group or dividing())
    return box[0]


def gather_from_all(value: Any) -> list[Any]:
    """Return the `value` of every rank of the run, however its ranks are divided."""
    return gather_objects(value, everyone())


def tell_all(value: Any) -> Any:
    """Return the `value` of the run's rank 0 on every rank of the run."""
    return broadcast_object(value, everyone())


@contextmanager
def recorded(
    kind: str, size: int, group: Group, lane: str | None = None, dtype: torch.dtype | None = None
) -> Iterator[None]:
    """Record the `with` block as a collective for which this rank waits.

    lane: the lane of the timeline in which the span is drawn. By default, it is `communication` if this rank computes
        on an accelerator, and otherwise `main`.
    """
    beat, where = _enter(group, kind), lane or ("main" if current().device is None else "communication")
    with ours(), current().collective(kind, size, where, numbered=_is_of_all(group), dtype=dtype):
        yield
    leave(beat)


def _run(
    kind: str,
    moved: Sequence[Tensor],
    group: Group,
    call: Callable[[Group], object],
    ends: Ends = EVERYONE,
    of: str = "",
) -> None:
    """Run a collective on the tensors `moved`, and wait for it."""
    if world_size(group) == 1:
        return
    size, device = _bytes(moved), moved[0].device if moved else _HOST
    watch = Stopwatch(device) if OPEN else None
    beat = _enter(group, kind, of, ends)
    numbered = None in ends and _is_of_all(group)
    dtype = moved[0].dtype if moved else None
    with ours(), current().collective(collective_name(kind, of), size, numbered=numbered, dtype=dtype):
        call(group or dividing())
    leave(beat)
    if watch is not None:
        log(kind, size, device, group, watch.stop(), ends)


def _is_of_all(group: Group) -> bool:
    """Return whether every rank of the run enters this collective, in this group or in a group beside it (see
    `divide_among`). The collective then has the same number on all ranks, by which the timeline matches it."""
    return group in (None, dividing()) or world_size(group) == world_size(everyone())


def _enter(group: Group, kind: str, of: str = "", ends: Ends = EVERYONE) -> int:
    """Count a collective that this rank enters, and tell the launcher of it. Returns the value to pass to `leave`."""
    if not dist.is_initialized():
        return 0
    if None in ends:
        key = group_key(group)
        entered[key] += 1
    else:
        own, ranks = get_rank(group), ranks_of(group)
        key = f"{','.join(str(ranks[end]) for end in ends if end not in (None, own))}/{PEERS}"
    return enter(collective_name(kind, of), key)


def _bytes(tensors: Sequence[Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors)


def _out(out: Tensor | None, shape: Sequence[int], tensor: Tensor) -> Tensor:
    return torch.empty(shape, dtype=tensor.dtype, device=tensor.device) if out is None else out
