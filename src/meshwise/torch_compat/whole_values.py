"""Make reads of a sharded tensor return the whole value.

DTensor itself does not do this.

`item`, `float` and `bool` of a DTensor read this rank's part; `format`, `tolist` and `numpy` fail. For meshes that were
passed to `read_whole`, reads reduce or gather first. All ranks must do this together, so `meet` is called before each
exchange. Operators that communicate internally (the sum of two norms) call it too.

The hooks are private. Based on torch 2.13: `distributed/tensor/_dispatch.py`, `_redistribute.py`,
`_api.py`, `nn/utils/clip_grad.py`, `optim/swa_utils.py`.
"""

from __future__ import annotations

import functools
import logging
import math
import sys
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, _api, _dispatch, _redistribute
from torch.nn.utils import clip_grad
from torch.optim import swa_utils

Meet = Callable[[str], None]
"""A function that waits for all ranks before they exchange data, or raises. Its argument describes the exchange."""
_EXCHANGE, _TOTAL_NORM = "redistribute_local_tensor", "_get_total_norm"
_GROUPED = "_group_tensors_by_device_and_dtype"
_READERS = ("__array__", "__format__", "__reduce_ex__", "__repr__", "cpu", "numpy", "tolist")
_MIXING = ("add", "sub", "mul", "div", "add_", "sub_")
_mixed = [False]  # whether an in-place operator added a DTensor to a plain tensor since the last `plain_loss`
_meets: dict[DeviceMesh, Meet] = {}
_weighs: dict[DeviceMesh, weakref.WeakMethod[Callable[[Tensor], Tensor]]] = {}


def read_whole(mesh: DeviceMesh, meet: Meet, weigh: Callable[[Tensor], Tensor] | None = None) -> None:
    """Make `item`, `float`, `print` and other reads of a tensor sharded over `mesh` return its whole value, from now
    on. Such reads are collective. They call `meet` first.

    weigh: a method that scales a gradient of this rank's loss before it is averaged over the ranks. The average is then
        the gradient of the global loss. Only a weak reference to the method is kept."""
    _meets[mesh] = meet
    if weigh is not None:
        _weighs[mesh] = weakref.WeakMethod(weigh)
    if mesh.ndim > 1:  # hide torch's warning about each number that is summed over two axes
        logging.getLogger(_redistribute.__name__).setLevel(logging.ERROR)
    _install()


def whole(tensor: Any) -> Tensor:
    """Return a plain tensor with all elements of a DTensor. Collective. The backward is collective too: it averages the
    gradients of all ranks, each scaled by the weight of the rank's loss."""
    kind = tensor.device_mesh.device_type  # offloaded shards are gathered on the devices
    there = tensor if tensor.device.type == kind else tensor.to(kind)
    gathered: Tensor = there.full_tensor()
    if gathered.requires_grad:
        gathered.register_hook(functools.partial(_mean, tensor.device_mesh))
    return gathered


def _mean(mesh: DeviceMesh, gradient: Tensor) -> Tensor:
    """Average, over the ranks, the gradients that each rank has computed from its own loss."""
    weigh = _weighs[mesh]() if mesh in _weighs else None
    own = gradient if weigh is None else weigh(gradient)
    return DTensor.from_local(own, mesh, [Partial("avg")] * mesh.ndim, run_check=False).full_tensor()


def plain_loss(loss: Tensor, mesh: DeviceMesh) -> Tensor | None:
    """Return the loss as a plain tensor, if some of its terms are DTensors, such as the norm of a parameter. Return
    None if it has no such terms. This call is collective. The backward of the returned loss is collective too."""
    if not isinstance(loss, DTensor) and not _mixed[0]:
        return None
    _mixed[0] = False
    if loss.grad_fn is not None:
        _separate(loss.grad_fn, mesh)
    return loss.full_tensor() if isinstance(loss, DTensor) else loss


def _separate(root: Any, mesh: DeviceMesh) -> None:
    """Give plain terms of a loss local gradients, and terms of shards averaged ones. root: the loss's autograd node."""
    numbers, consumers = {root}, dict[Any, list[Any]]()
    open_nodes, sharded = [root], list[Any]()
    while open_nodes:
        node = open_nodes.pop()
        for before, index in node.next_functions:
            if before is not None and _is_number(before, index):
                consumers.setdefault(before, []).append(node)
                if before not in numbers:
                    numbers.add(before)
                    open_nodes.append(before)
        if _is_made_of_shards(node):
            sharded.append(node)
    of_shards = _upstream(sharded, consumers)
    plain = {n for n in numbers - of_shards if any(c in of_shards for c in consumers.get(n, ()))}
    mixed = of_shards & _upstream(plain, consumers)
    alone = {n for n in of_shards - mixed if n is root or any(c in mixed for c in consumers[n])}
    for node in plain:
        node.register_prehook(_local)
    for node in alone:
        node.register_prehook(functools.partial(_averaged, mesh))


def _is_number(node: Any, index: int) -> bool:
    leaf = getattr(node, "variable", None)
    return bool(math.prod(leaf.shape if leaf is not None else node._input_metadata[index].shape) == 1)


def _is_made_of_shards(node: Any) -> bool:
    """Return whether an autograd node computes a single number, such as a norm, from a sharded parameter."""
    larger = [n for n, index in node.next_functions if n is not None and not _is_number(n, index)]
    while larger:
        node = larger[0]
        if "_ToTorchTensor" in node.name():
            return False
        if hasattr(node, "variable"):
            break
        following = [(n, index) for n, index in node.next_functions if n is not None]
        larger = [n for n, index in following if not _is_number(n, index)] or [n for n, _ in following]
    return isinstance(getattr(node, "variable", None), DTensor)


def _upstream(nodes: Iterable[Any], consumers: dict[Any, list[Any]]) -> set[Any]:
    """Return `nodes`, and all nodes that use their results, directly or indirectly (`consumers` lists them)."""
    found, open_nodes = set(nodes), list(nodes)
    while open_nodes:
        fresh = [node for node in consumers.get(open_nodes.pop(), ()) if node not in found]
        found.update(fresh)
        open_nodes += fresh
    return found


def _local(gradients: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
    return tuple(_replicated(g).to_local() if isinstance(g, DTensor) else g for g in gradients)


def _averaged(mesh: DeviceMesh, gradients: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
    everywhere = [Replicate()] * mesh.ndim
    return tuple(
        None if g is None else DTensor.from_local(_mean(mesh, g), mesh, everywhere, run_check=False)
        for g in _local(gradients)
    )


def _replicated(gradient: DTensor) -> DTensor:
    """Return the gradient with its whole value on each rank. Partial sums are added up over the ranks."""
    if any(p.is_partial() for p in gradient.placements):
        return gradient.redistribute(placements=[Replicate()] * gradient.device_mesh.ndim)
    return gradient


@functools.cache
def _install() -> None:
    for module in (_api, _dispatch, _redistribute):
        setattr(module, _EXCHANGE, _met(getattr(module, _EXCHANGE)))
    dispatcher: Any = DTensor._op_dispatcher
    handlers, aten = dispatcher._custom_op_handlers, torch.ops.aten
    for operator in (aten._local_scalar_dense.default, aten.equal.default, aten.allclose.default):
        handlers[operator] = _on_wholes
    for operator in (aten.argmax.default, aten.argmin.default):
        handlers[operator] = functools.partial(_on_parts, handlers[operator])
    for name in _MIXING:
        handlers[getattr(aten, name).Tensor] = functools.partial(_on_a_plain_number, handlers)
    kind: Any = DTensor
    for name in _READERS:
        setattr(kind, name, _reader(name, getattr(kind, name)))
    setattr(clip_grad, _TOTAL_NORM, _plain(getattr(clip_grad, _TOTAL_NORM)))
    setattr(swa_utils, _GROUPED, _apart(getattr(swa_utils, _GROUPED)))


def _met(exchange: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Wrap torch's function that changes the placements of a DTensor, so that it calls `meet` first."""

    @functools.wraps(exchange)
    def exchanged(local: Tensor, now: Any, then: Any, **options: Any) -> Tensor:
        meet = _meets.get(now.mesh)
        moves = (a != b and not a.is_replicate() for a, b in zip(now.placements, then.placements, strict=True))
        if meet is not None and any(moves):
            meet(_text(now))
        return exchange(local, now, then, **options)

    return exchanged


def _text(spec: Any) -> str:
    return f"{tuple(spec.shape)} {spec.placements}"


def _on_wholes(operator: Any, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
    """Gather the arguments of an operator that returns a single number, and run it on the whole tensors."""
    first: Any = arguments[0]
    if operator is torch.ops.aten._local_scalar_dense.default and first.device_mesh not in _meets:
        return operator(first._local_tensor)  # without `read_whole`, read this rank's part, as torch does
    return operator(*[whole(a) if isinstance(a, DTensor) else a for a in arguments], **keywords)


def _on_parts(handler: Callable[..., Any], operator: Any, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
    """Call `meet`, then run an operator such as `argmax` by torch's own `handler` for DTensors."""
    first: Any = arguments[0]
    if (meet := _meets.get(first.device_mesh)) is not None:
        meet(_text(first._spec))
    return handler(operator, arguments, keywords)


def _on_a_plain_number(
    handlers: dict[Any, Any], operator: Any, arguments: tuple[Any, ...], keywords: dict[str, Any]
) -> Any:
    """Run an operator on a DTensor and a tensor of other placements, after adding up the DTensor's partial sums."""
    first, second = arguments[:2]
    either: Any = first if isinstance(first, DTensor) else second
    if (
        isinstance(second, Tensor)
        and either.device_mesh in _meets
        and getattr(first, "placements", None) != getattr(second, "placements", None)
    ):
        arguments = tuple(_replicated(a) if isinstance(a, DTensor) else a for a in arguments)
        if not isinstance(first, DTensor) and "_." in str(operator):
            _mixed[0] = True
            return operator(*[a.to_local() if isinstance(a, DTensor) else a for a in arguments], **keywords)
    own = handlers.pop(operator)
    try:
        return operator(*arguments, **keywords)
    finally:
        handlers[operator] = own


def _reader(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def read(tensor: Any, *arguments: Any, **keywords: Any) -> Any:
        moved = sys._getframe(1).f_code.co_filename == nn.modules.module.__file__  # `model.cpu()` keeps tensors sharded
        if moved or tensor.device_mesh not in _meets:
            return original(tensor, *arguments, **keywords)
        kept = name in ("__repr__", "__reduce_ex__")  # print and pickle the tensor as on one device
        there = whole(tensor.detach() if kept else tensor)
        if name == "__reduce_ex__":  # the whole tensors may not all fit on a device
            there = there.cpu()
        if kept and isinstance(tensor, nn.Parameter):
            there = nn.Parameter(there, tensor.requires_grad)
        return getattr(there, name)(*arguments, **keywords)

    return read


def _apart(grouped: Callable[..., Any]) -> Callable[..., Any]:
    """Make `AveragedModel` group tensors by device mesh too, not only by device and dtype."""

    @functools.wraps(grouped)
    def apart(lists: Any, *arguments: Any) -> dict[Any, Any]:
        by_mesh: dict[Any, list[int]] = {}
        for place, tensor in enumerate(lists[0]):
            by_mesh.setdefault(getattr(tensor, "device_mesh", None), []).append(place)
        found: dict[Any, Any] = {}
        for mesh, places in by_mesh.items():
            of_mesh = grouped([[each[place] for place in places] for each in lists], *arguments)
            found |= {(device, (dtype, mesh)): group for (device, dtype), group in of_mesh.items()}
        return found

    return apart


def _plain(total_norm: Callable[..., Tensor]) -> Callable[..., Tensor]:
    @functools.wraps(total_norm)
    def plain(tensors: Any, norm_type: float = 2.0, *arguments: Any, **keywords: Any) -> Tensor:
        by_mesh: dict[Any, list[Tensor]] = {}  # DTensor can only add tensors of one mesh
        for tensor in [tensors] if isinstance(tensors, Tensor) else tensors:
            by_mesh.setdefault(tensor.device_mesh if isinstance(tensor, DTensor) else None, []).append(tensor)
        norms = [total_norm(of_one, norm_type, *arguments, **keywords) for of_one in by_mesh.values() or [[]]]
        norms = [whole(n) if isinstance(n, DTensor) and n.device_mesh in _meets else n for n in norms]
        return norms[0] if len(norms) == 1 else torch.linalg.vector_norm(torch.stack(norms), norm_type)

    return plain
