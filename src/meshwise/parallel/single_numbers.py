"""Keep scalar parameters whole on every rank under shard.

A scalar, such as a temperature, cannot be divided.

In the forward of a module, each scalar parameter is replaced by a leaf tensor of this rank with the same memory. The
gradients of these leaves stay unreduced until sharded gradients are reduced. Then they are averaged over the ranks in
one collective.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Collection, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

from meshwise.torch_compat.modules import parameters_in, put_around_methods, put_forward
from meshwise.torch_compat.sharding import local_of
from meshwise.transfer import collectives
from meshwise.transfer.sharded import placed


class SingleNumbers:
    """The scalar parameters of `model`, except complex parameters and parameters in `absent`."""

    def __init__(self, model: nn.Module, mesh: DeviceMesh, absent: Collection[nn.Parameter]) -> None:
        self.places: dict[str, tuple[nn.Module, str]] = {}
        self._mesh = mesh
        self._leaves: dict[str, tuple[Tensor, Tensor]] = {}  # name -> (parameter, leaf used in its place)
        known: dict[nn.Parameter, tuple[str, nn.Parameter]] = {}
        for full, module in list(model.named_modules()):
            inside = {}
            for name, p in list(module.named_parameters(recurse=False)):
                if p.ndim == 0 and p not in absent and not p.is_complex():
                    if p not in known:
                        self.places[f"{full}.{name}" if full else name] = module, name
                        known[p] = next(reversed(self.places)), placed(p, mesh, [Replicate()] * mesh.ndim)
                    inside[name] = known[p][0], p.device_mesh if isinstance(p, DTensor) else None
                    module.register_parameter(name, known[p][1])
            if inside:
                put_forward(module, functools.partial(self._run, module, inside, module.forward))
                put_around_methods(module, functools.partial(self._around_method, module, inside))

    def _run(self, module: nn.Module, inside: Any, forward: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        with self._with_leaves(module, inside):
            return forward(*args, **kwargs)

    def _around_method(
        self, module: nn.Module, inside: Any, output: list[Any]
    ) -> contextlib.AbstractContextManager[None] | None:
        own: dict[str, Any] = parameters_in(module)  # during a forward, it already holds leaves or split tensors
        held = any(isinstance(own[name], DTensor) and own[name].device_mesh == self._mesh for name in inside)
        return self._with_leaves(module, inside) if held else None

    @contextlib.contextmanager
    def _with_leaves(self, module: nn.Module, inside: dict[str, tuple[str, DeviceMesh | None]]) -> Iterator[None]:
        own = parameters_in(module)
        held = {name: own[name] for name in inside}
        own.update({name: self._leaf(held[name], *inside[name]) for name in inside})
        try:
            yield
        finally:
            own.update(held)

    def _leaf(self, held: Any, name: str, mesh: DeviceMesh | None) -> Tensor:
        """Return the leaf tensor to use in place of a scalar parameter."""
        of, leaf = self._leaves.get(name, (None, None))
        if leaf is not None and (leaf is held or (of is held and of.requires_grad == leaf.requires_grad)):
            return leaf
        local = local_of(held.detach())
        made = local if mesh is None else DTensor.from_local(local, mesh, [Replicate()], run_check=False)
        self._leaves[name] = held, nn.Parameter(made, held.requires_grad)
        return self._leaves[name][1]

    def waiting(self) -> list[Tensor]:
        """Return this rank's gradients of scalar parameters that `reduce` has not averaged over the ranks yet."""
        return [leaf.grad for _, leaf in self._leaves.values() if leaf.grad is not None]

    def reduce(self, weighed: Callable[[Tensor], Tensor]) -> None:
        """Average the gradients of the scalar parameters over all ranks, and add each average to the `grad` of its
        parameter."""
        found = [(held, leaf) for held, leaf in self._leaves.values() if leaf.requires_grad]
        if not found:
            return
        mine = [None if leaf.grad is None else weighed(local_of(leaf.grad)) for _, leaf in found]
        wide = any(held.dtype == torch.float64 for held, _ in found)
        zero = local_of(found[0][1].detach()).new_zeros((), dtype=torch.float64 if wide else torch.float32)
        numbers = [zero if gradient is None else gradient.to(zero) for gradient in mine]
        reached = [zero + (gradient is not None) for gradient in mine]
        means = collectives.all_reduce_mean(torch.stack(numbers + reached), of="gradients of single numbers")
        for place, (held, leaf) in enumerate(found):
            leaf.grad = None
            if mine[place] is not None or bool(means[len(found) + place]):
                p: Any = held
                everywhere = [Replicate()] * p.device_mesh.ndim
                mean = DTensor.from_local(means[place].to(p.dtype), p.device_mesh, everywhere, run_check=False)
                p.grad = mean if p.grad is None else p.grad + mean
