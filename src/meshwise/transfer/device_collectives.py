"""Broadcast, scatter, gather and all-reduce over one process's devices.

    parts = scatter(batch, ["cuda:0", "cuda:1"])
    all_reduce(gradients)                      the result has the same bits on every device

All of these functions copy with `transfer.copy`. So each copy is logged, goes by the best path and can be verified.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import combinations

import torch
import torch.cuda.nccl as nccl
from torch import Tensor

from meshwise.spec.errors import UsageError, check_known
from meshwise.spec.machine import Machine
from meshwise.transfer.comm_log import Stopwatch, note
from meshwise.transfer.copy import CopyOptions, move, moved_to, overlapping, repeats
from meshwise.transfer.devices import as_device, device_of, empty_like, name_of, plainly
from meshwise.transfer.interop import from_array

Device = str | torch.device | int


def broadcast(
    tensor: Tensor, devices: Sequence[Device], *, links: Machine | None = None, verify: bool = False
) -> list[Tensor]:
    """Copy `tensor` to new memory on each device, and return the copies in the order of the devices.

    The backward sums the gradients of all copies.
    """
    options = CopyOptions(links, verify)
    return [moved_to(tensor, device, "broadcast", options, own=True) for device in _devices("broadcast", devices)]


def scatter(
    tensor: Tensor,
    devices: Sequence[Device],
    dim: int = 0,
    *,
    sizes: Sequence[int] | None = None,
    links: Machine | None = None,
    verify: bool = False,
) -> list[Tensor]:
    """Divide `tensor` along `dim`, and copy one part to new memory on each device, in order.

    By default, the lengths of the parts differ by at most one, and longer parts come first, as in `torch.tensor_split`.
    A part may be empty. Gradients flow back to `tensor`. Raises UsageError if `sizes` does not add up to the length of
    `dim`.

    sizes: the length of each part.
    """
    places, tensor = _devices("scatter", devices), from_array(tensor)
    if sizes is not None and len(sizes) != len(places):
        raise UsageError(f"scatter(sizes={list(sizes)}): {len(places)} devices need one size each.")
    with _refusing("scatter"):
        parts = tensor.tensor_split(len(places), dim) if sizes is None else tensor.split(list(sizes), dim)
    options = CopyOptions(links, verify)
    return [moved_to(part, device, "scatter", options, own=True) for part, device in zip(parts, places, strict=True)]


def gather(
    tensors: Sequence[Tensor], device: Device, dim: int = 0, *, links: Machine | None = None, verify: bool = False
) -> Tensor:
    """Concatenate the tensors, in order, along `dim` on `device`. Gradients flow back to the tensors' devices.

    Raises UsageError if the dtypes differ, or if the shapes differ in another dim than `dim`.
    """
    target = as_device(device)
    _check_several("gather", tensors)
    tensors = [from_array(tensor) for tensor in tensors]
    if len({tensor.dtype for tensor in tensors}) != 1:
        raise UsageError(f"gather of {[tensor.dtype for tensor in tensors]}: tensors of one dtype are needed.")
    with torch.no_grad(), plainly(), _refusing("gather"):
        shape = torch.cat([torch.empty_like(tensor, device="meta") for tensor in tensors], dim)
    options = CopyOptions(links, verify)
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
        return torch.cat([moved_to(tensor, target, "gather", options) for tensor in tensors], dim)
    whole, lengths = empty_like(shape, target), [tensor.shape[dim] for tensor in tensors]
    for part, tensor in zip(whole.split(lengths, dim), tensors, strict=True):
        move(part, tensor, "gather", options)
    return whole


def all_reduce(
    tensors: Sequence[Tensor], op: str = "sum", *, links: Machine | None = None, verify: bool = False
) -> list[Tensor]:
    """Reduce tensors of equal shape, one per device, in place, and return them as a list.

    Afterwards all tensors hold the same bits. Each device reduces one slice of the elements, in the order of the list
    and in the tensors' dtype, and sends the result to all devices. Each of n devices sends 2 (n - 1) / n of a tensor's
    bytes, as in a ring all-reduce. The result does not depend on timing. Gradients are not supported.

    The sum of tensors on distinct CUDA devices is computed by NCCL if NCCL supports the dtype. Its result is also the
    same on all devices, but NCCL chooses the order of the sum. NCCL is not used if `verify` or `links` is given.

    op: `sum`, `mean`, `product`, `min` or `max`.
    links: a machine. The path of each copy is chosen by the measured speed of the machine's links.
    verify: whether to compare the checksums of each copy and its source, which waits for the copy.
    """
    _check_several("all_reduce", tensors)
    every = _reducible(list(tensors), op)
    with torch.no_grad():
        if op == "sum" and not verify and links is None and _by_nccl(every):
            return every
        _reduce_slices(every, _OPERATIONS[op], CopyOptions(links, verify), mean=op == "mean")
    return every


_OPERATIONS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "sum": Tensor.add_,
    "mean": Tensor.add_,
    "product": Tensor.mul_,
    "min": lambda total, term: torch.minimum(total, term, out=total),
    "max": lambda total, term: torch.maximum(total, term, out=total),
}


_FLOATS = torch.float16, torch.bfloat16, torch.float32, torch.float64
_NCCL_DTYPES = (*_FLOATS, torch.uint8, torch.int8, torch.int32, torch.int64)


def _reduce_slices(
    tensors: list[Tensor], reduce: Callable[[Tensor, Tensor], Tensor], options: CopyOptions, *, mean: bool
) -> None:
    """Reduce the tensors by a reduce-scatter, in which device k reduces slice k, and an all-gather."""
    flat = [tensor.contiguous() for tensor in tensors]
    parts = zip(*(tensor.view(-1).tensor_split(len(flat)) for tensor in flat), strict=True)
    slices = [terms for terms in parts if terms[0].numel()]
    totals = []
    for owner, (first, *others) in zip(flat, slices, strict=False):  # there may be fewer slices than tensors
        place = device_of(owner)
        total = moved_to(first, place, "all-reduce", options, own=True)
        for term in others:
            reduce(total, moved_to(term, place, "all-reduce", options))
        totals.append(total.div_(len(flat)) if mean else total)
    for terms, total in zip(slices, totals, strict=True):
        for term in terms:
            move(term, total, "all-reduce", options)
    for tensor, contiguous in zip(tensors, flat, strict=True):
        if tensor is not contiguous:
            tensor.copy_(contiguous)


def _by_nccl(tensors: list[Tensor]) -> bool:
    """Sum the tensors by NCCL if it supports them and they are on distinct CUDA devices. Return True if it was used."""
    distinct = len({tensor.device for tensor in tensors}) == len(tensors) > 1
    if not (distinct and all(tensor.is_cuda for tensor in tensors) and nccl.is_available(tensors)):
        return False
    if tensors[0].dtype not in _NCCL_DTYPES:
        return False  # torch raises "Unconvertible NCCL type" for other dtypes
    # One call covers all devices, so only the first device's stream is timed.
    stream = torch.cuda.current_stream(tensors[0].device)
    watch = Stopwatch(tensors[0].device, stream)
    nccl.all_reduce(tensors)
    names = [name_of(tensor.device) for tensor in tensors]
    note("all-reduce", names[0], f"{len(names)} devices", tensors[0].nbytes, "nccl", watch.stop(stream))
    return True


def _devices(verb: str, devices: Sequence[Device]) -> list[torch.device]:
    if isinstance(devices, str) or not len(devices):
        raise UsageError(f"{verb}: devices must be a list with entries, such as ['cuda:0', 'cuda:1'], not {devices!r}.")
    return [as_device(device) for device in devices]


def _check_several(verb: str, tensors: object) -> None:
    """Raise UsageError for a single tensor. Its rows would otherwise be taken for the tensors of several devices."""
    if isinstance(tensors, Tensor):
        over = "mw.sum(tensor)" if verb == "all_reduce" else "mw.gather_samples(tensor)"
        raise UsageError(
            f"mw.{verb} takes a list of tensors, one for each device of this process, but was given one tensor. To "
            f"combine tensors of several ranks, write {over}."
        )


@contextmanager
def _refusing(verb: str) -> Iterator[None]:
    """Turn errors of torch in the block into a UsageError."""
    try:
        yield
    except (RuntimeError, IndexError) as error:
        raise UsageError(f"{verb}: {error}") from None


def _reducible(tensors: list[Tensor], op: str) -> list[Tensor]:
    check_known("op", op, _OPERATIONS)
    if not tensors:
        raise UsageError("all_reduce needs a tensor for each device, but the list is empty.")
    for tensor in tensors:
        if not isinstance(tensor, Tensor):
            raise UsageError(f"all_reduce changes tensors in place, but {type(tensor).__name__} is not a tensor.")
        if tensor.requires_grad and tensor.is_leaf and torch.is_grad_enabled():
            raise UsageError("all_reduce changes tensors in place, but one tensor requires grad. Use torch.no_grad().")
    first = tensors[0]
    for tensor in tensors[1:]:
        if tensor.shape != first.shape or tensor.dtype != first.dtype:
            raise UsageError(
                f"all_reduce of {first.dtype} {tuple(first.shape)} and {tensor.dtype} {tuple(tensor.shape)}: all "
                "tensors must have the same shape and dtype."
            )
    with plainly():
        twice = len({tensor.data_ptr() for tensor in tensors}) < len(tensors) and first.numel()
        shared = any(overlapping(one, other) for one, other in combinations(tensors, 2))
        if twice or shared or any(map(repeats, tensors)):
            raise UsageError("all_reduce works in place, but tensors or elements share memory. Pass a clone of each.")
    if first.dtype == torch.bool or (op == "mean" and not (first.is_floating_point() or first.is_complex())):
        raise UsageError(f"all_reduce with op={op!r} does not support {first.dtype}. Convert the tensors to float.")
    if first.is_complex() and op in ("min", "max"):
        raise UsageError(f"all_reduce with op={op!r}: complex numbers have no order. Pass torch.view_as_real(tensor).")
    return tensors
