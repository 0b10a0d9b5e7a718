"""Copy tensors between the devices of one process.

All such copies go through one function, `copy`.

    copy(dst, src)                 right after the call, dst may be read on its device's current stream
    to(batch, "cuda:1")            the same for every tensor of a tuple, list, dict or module

A copy between two devices goes directly, from peer to peer, or staged through the host (`path.py`); the log names the
path. On some machines, such copies are corrupted (pytorch issue 132397: zeros under an IOMMU); `verify=True` detects
this.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from meshwise.spec.devices import has_streams
from meshwise.spec.errors import TransferError, UsageError
from meshwise.spec.machine import Machine
from meshwise.spec.units import bytes_text
from meshwise.torch_compat.tree import map_leaves
from meshwise.transfer import interop
from meshwise.transfer.checksum import first_difference
from meshwise.transfer.comm_log import OPEN, Seconds, Stopwatch, note
from meshwise.transfer.devices import OPEN_DEVICES, as_device, device_of, empty_like, name_of, open_devices, plainly
from meshwise.transfer.path import AUTO, STAGED, choose, staged

# A build of torch without CUDA or ROCm has only the host's memory, so there is no path to choose.
_ONE_MEMORY = torch.version.cuda is None and torch.version.hip is None


@dataclass(frozen=True)
class CopyOptions:
    """The arguments of `copy` and `to` that say how a copy is made.

    ends: the names of source and target in the log. None uses the names of their devices.
    """

    links: Machine | None = None
    verify: bool = False
    path: str = AUTO
    stream: torch.Stream | None = None
    non_blocking: bool = False
    ends: tuple[str, str] | None = None


DEFAULT = CopyOptions()


def copy(
    dst: Tensor,
    src: Any,
    *,
    links: Machine | None = None,
    verify: bool = False,
    path: str = AUTO,
    stream: torch.Stream | None = None,
) -> Tensor:
    """Copy `src` to `dst`, on any devices, and return `dst`. Values are cast to the dtype of `dst`.

    The shapes must be equal, except that `dst` may have additional leading dims of 1. Without `stream`, both tensors
    may be used right after the call, on their current streams and by the host. If the tensors overlap in memory, the
    copy goes through a temporary tensor. Raises UsageError for an impossible copy, and TransferError if `verify` finds
    a difference.

    src: a tensor, or an array of NumPy, CuPy, JAX or Numba.
    links: a machine. The path of the copy is chosen by the measured speed of the machine's links.
    verify: whether to compare checksums of both tensors, which waits for the copy.
    path: `peer` or `staged`, to choose the path by hand.
    stream: a CUDA stream on which to copy, without waiting. Wait for that stream before you read `dst` or write `src`.
    """
    if path == AUTO and not (verify or OPEN or OPEN_DEVICES or links or stream):
        try:  # the common case reads few tensor attributes: each costs about 50 ns, or 1 µs with cold caches
            if (
                dst.numel() == src.numel()  # then broadcasting `src` can only add leading dims of 1
                and ((dst.is_contiguous() and src.is_contiguous()) or torchs_check_is_sure(dst, src))
                and (not src.is_complex() or dst.is_complex())
                and (_ONE_MEMORY or dst.is_cpu or src.is_cpu or dst.device == src.device)
            ):
                return dst.copy_(src)
        except (AttributeError, RuntimeError):
            pass  # the general case follows
    return move(dst, src, "copy", CopyOptions(links, verify, path, stream))


def to(
    tree: Any,
    device: str | torch.device | int,
    *,
    links: Machine | None = None,
    verify: bool = False,
    path: str = AUTO,
    non_blocking: bool = False,
) -> Any:
    """Move every tensor in `tree` to `device`, and return the result.

    `tree` may be a tensor, a tuple, list or dict, a module (moved in place), or an array of another library. A tensor
    that is already on `device` is returned unchanged. The backward pass moves the gradients back. The other arguments
    are as in `copy`.

    non_blocking: whether the program continues before a copy from pinned memory to a device has ended. The source must
        not be changed until then. Copies to the host always wait, so that they can be read.
    """
    target, options = as_device(device), CopyOptions(links, verify, path, non_blocking=non_blocking)

    def moved(leaf: Any) -> Any:
        if isinstance(leaf, nn.Module):
            _move_module(leaf, moved)
            return leaf
        if isinstance(leaf, set | frozenset):
            raise UsageError(f"to({type(leaf).__name__}): the order of a set is not fixed. Pass a list or a dict.")
        return moved_to(leaf, target, "to", options)

    return map_leaves(moved, tree, _is_leaf)


def _is_leaf(item: Any) -> bool:
    if isinstance(item, set | frozenset):
        return any(isinstance(one, Tensor) for one in item)
    return isinstance(item, nn.Module) or interop.is_array(item)


def moved_to(
    leaf: Any, target: torch.device, operation: str, options: CopyOptions = DEFAULT, *, own: bool = False
) -> Tensor:
    """Return `leaf` as a tensor on `target`.
    Log a copy as `operation`. own: whether to copy `leaf` even if it is there."""
    tensor = interop.from_array(leaf)
    if device_of(tensor) == target and not own:
        return tensor
    if tensor.layout != torch.strided:
        raise UsageError(f"to() copies only dense tensors, not {tensor.layout}. Copy the dense components to {target}.")
    if tensor.requires_grad and torch.is_grad_enabled():
        crossed: Tensor = _Crossing.apply(tensor, target, operation, options)  # type: ignore[no-untyped-call]
        return crossed
    dst = empty_like(tensor, target)
    with torch.no_grad():
        return move(dst, tensor, operation, options)


def move(dst: Tensor, src: Any, operation: str, options: CopyOptions = DEFAULT) -> Tensor:
    """Copy `src` to `dst` as `copy` does, and log the copy under the name `operation`."""
    stream = options.stream
    src = _check(dst, interop.from_array(src), stream)
    source, target = device_of(src), device_of(dst)
    way = choose(name_of(source), name_of(target), src.nbytes, wanted=options.path, links=options.links)
    if stream is not None and way == STAGED:
        raise UsageError("a copy by path 'staged' runs on its own streams, not on stream=. Leave stream out.")
    if src.requires_grad and torch.is_grad_enabled() and source != target:
        return dst.copy_(moved_to(src, target, operation, replace(options, stream=None, non_blocking=False)))
    with plainly():
        if source == target and overlapping(dst, src):
            src = src.clone()
        ends = options.ends or (name_of(source), name_of(target))
        _run(dst, src, way, (operation, *ends, src.nbytes), options)
        if options.verify:
            if stream is not None:
                stream.synchronize()
            _verify(dst, src, way, f"{operation} from {name_of(source)} to {name_of(target)}")
    return dst


class _Crossing(torch.autograd.Function):
    """A copy to another device. Its backward copies the gradient to the original device."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, target: torch.device, operation: str, options: CopyOptions) -> Tensor:
        ctx.source, ctx.operation, ctx.options = device_of(tensor), operation, options
        return move(empty_like(tensor, target), tensor, operation, options)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        return moved_to(gradient, ctx.source, f"{ctx.operation} backward", ctx.options), None, None, None


def _check(dst: Any, src: Tensor, stream: torch.Stream | None) -> Tensor:
    """Return `src` expanded to the shape of `dst`. Raises UsageError if it cannot be copied to `dst`."""
    if not isinstance(dst, Tensor):
        raise UsageError(f"copy: dst must be a tensor, not {type(dst).__name__}. For a new one, write to(src, device).")
    if dst.dim() > src.dim() and dst.shape == (1,) * (dst.dim() - src.dim()) + src.shape:
        src = src.expand(dst.shape)
    if dst.shape != src.shape:
        shapes = f"{tuple(src.shape)} into {tuple(dst.shape)}"
        raise UsageError(f"copy of shape {shapes}: both shapes must be equal. Pass src.expand(...) or src.view(...).")
    if dst.layout != torch.strided or src.layout != torch.strided:
        raise UsageError(
            f"copy of {src.layout} into {dst.layout}: only dense tensors can be copied. Copy their dense components."
        )
    if dst.is_complex() < src.is_complex():
        raise UsageError(f"copy of {src.dtype} into {dst.dtype} would lose the imaginary part. Pass src.real instead.")
    with plainly():
        if repeats(dst):
            raise UsageError(f"copy: elements of dst share memory (strides {dst.stride()}). Pass a clone of dst.")
    if dst.requires_grad and dst.is_leaf and torch.is_grad_enabled():
        raise UsageError("copy changes dst in place, and dst requires a gradient. Call it under torch.no_grad().")
    owner = src.device if has_streams(src.device) else dst.device
    if stream is not None and stream.device != owner:
        raise UsageError(f"copy runs on {owner}, but stream= is of {stream.device}. Create the stream on {owner}.")
    return src


def _run(dst: Tensor, src: Tensor, way: str, row: tuple[str, str, str, int], options: CopyOptions) -> None:
    """Copy by the path `way`, and log the copy."""
    watch = Stopwatch(None)
    if way == STAGED:
        seconds = staged(dst, src)
    elif has_streams(dst.device) or has_streams(src.device):
        seconds = _on_stream(dst, src, options.stream, options.non_blocking)
    else:
        dst.copy_(src)
        seconds = watch.stop()
    open_one = open_devices()
    if open_one is not None and open_one.on_copy is not None and row[1] != row[2]:
        open_one.on_copy(dst, src, way)
    if OPEN:
        note(*row, way, seconds)


def _on_stream(dst: Tensor, src: Tensor, stream: torch.Stream | None, non_blocking: bool) -> Seconds:
    """Copy with torch, which makes both devices' current streams wait for each other.
    Return the time of the copy."""
    owner = src.device if has_streams(src.device) else dst.device  # torch copies on the source's stream
    current = torch.get_device_module(owner).current_stream(owner)
    run = stream or current
    if stream is not None:
        stream.wait_stream(current)
    with run:
        watch = Stopwatch(owner if OPEN else None, run)
        dst.copy_(src, non_blocking=stream is not None or (non_blocking and not dst.is_cpu))
        seconds = watch.stop(run)
    if stream is not None:
        for tensor in (dst, src):
            if has_streams(tensor.device):
                tensor.record_stream(stream)
    return seconds


def _verify(dst: Tensor, src: Tensor, way: str, what: str) -> None:
    """Raise TransferError if the bits of `dst` differ from the bits of `src` after a cast to the dtype of `dst`."""
    expected = src.detach().to(dst.dtype)
    offset = first_difference(dst.detach(), expected)
    if offset is None:
        return
    element = offset // dst.element_size()
    raise TransferError(
        f"{what} by path '{way}': the {bytes_text(dst.nbytes)} arrived corrupt. The first wrong byte is {offset:,} "
        f"(element {element:,} of {dst.numel():,}). Do not use this path: run `meshwise bench --links`, and choose "
        "another path with path=."
    )


def _move_module(module: nn.Module, moved: Callable[[Tensor], Tensor]) -> None:
    """Move a module's parameters, their gradients and its buffers in place, like torch's Module.to."""
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.grad is not None:
                parameter.grad.data = moved(parameter.grad.data)
            parameter.data = moved(parameter.data)
        for part in module.modules():
            for name, buffer in list(part.named_buffers(recurse=False)):
                setattr(part, name, moved(buffer))


def repeats(tensor: Tensor) -> bool:
    """Check whether elements of the tensor share memory, as in an expanded tensor or overlapping windows."""
    if tensor.is_contiguous() or tensor.numel() < 2:
        return False
    reach = 0  # offset of the furthest element along the smaller strides
    certain = True
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size == 1:
            continue
        if stride == 0:
            return True
        if stride <= reach:
            certain = False
        reach += stride * (size - 1)
    return not certain and _places(tensor).unique().numel() < tensor.numel()


def overlapping(tensor: Tensor, other: Tensor) -> bool:
    """Check whether two tensors may share memory without being the same view."""
    if tensor.numel() == 0 or other.numel() == 0 or _apart(tensor, other) or tensor.is_set_to(other):
        return False
    start, end = _range(tensor)
    first, last = _range(other)
    return tensor.device == other.device and start < last and first < end


def torchs_check_is_sure(dst: Tensor, src: Tensor) -> bool:
    """Check whether torch's own check for shared memory in `dst.copy_(src)` is enough."""
    if dst.is_contiguous():
        return src.is_contiguous() or _apart(dst, src)
    return not repeats(dst) and _apart(dst, src)


def _apart(tensor: Tensor, other: Tensor) -> bool:
    """Check whether the tensors' storages have no byte in common."""
    ours, its = tensor.untyped_storage(), other.untyped_storage()
    start, first = ours.data_ptr(), its.data_ptr()
    return start + ours.nbytes() <= first or first + its.nbytes() <= start


def _range(tensor: Tensor) -> tuple[int, int]:
    """Return the address of the tensor's first byte and the address after its last byte."""
    reach = sum(stride * (size - 1) for stride, size in zip(tensor.stride(), tensor.shape, strict=True))
    start = tensor.data_ptr()
    return start, start + (reach + 1) * tensor.element_size()


def _places(tensor: Tensor) -> Tensor:
    """Return the offset of every element from the first element, in elements."""
    places = torch.zeros((), dtype=torch.int64)
    for stride, size in zip(tensor.stride(), tensor.shape, strict=True):
        places = places.unsqueeze(-1) + torch.arange(size) * stride
    return places
