"""Divide the experts of a mixture among ranks: expert parallel.

Each rank of the axis holds some of the experts, and works on different samples.

The experts are one module with stacked parameters, each of shape (experts, ...). Its forward takes hidden states, the
experts of each token and their routing weights, as in transformers; or it takes rows that are already sorted by expert.
The parameters become DTensors on the mesh axis `expert`, and each rank holds consecutive experts. There is one row
of hidden states for each token and expert. It is sent to the rank that has the expert, where the module's forward runs
on it, and the result is sent back and summed (GShard, arXiv:2006.16668). No line of the model changes. Experts that
are modules of a list are refused.

The gradient of an expert comes from the tokens of all ranks of the axis. It is divided by the number of ranks when it
arrives, so that it is the mean over the ranks, and only the other axes remain to be reduced over. All other parameters
are replicated over the axis, and are reduced over it as over `data` (shard.py).
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import Function
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from meshwise.parallel.mesh import make_mesh
from meshwise.parallel.technique import Setup, Technique
from meshwise.spec.errors import PlanError
from meshwise.spec.words import some
from meshwise.torch_compat.dtensor_operators import take_several_meshes
from meshwise.torch_compat.modules import parameters_in, put_forward
from meshwise.transfer import collectives


@dataclass(frozen=True)
class ExpertAxis:
    """The ranks of the mesh axis over which experts are divided, with the collectives between them."""

    size: int
    rank: int
    group: collectives.Group

    def all_gather(self, tensor: Tensor) -> Tensor:
        """Gather `tensor` from every rank, stacked in rank order."""
        return collectives.all_gather(tensor, self.group, of="tokens of experts")

    def exchange(self, sent: Sequence[Tensor], taken: Sequence[Tensor]) -> None:
        """Send `sent[r]` to rank r and receive `taken[r]` from rank r. Each of these tensors may have no rows."""
        taken[self.rank].copy_(sent[self.rank])
        sends = [(rows, r) for r, rows in enumerate(sent) if r != self.rank and len(rows)]
        receives = [(rows, r) for r, rows in enumerate(taken) if r != self.rank and len(rows)]
        if sends or receives:
            collectives.send_receive(sends, receives, self.group, "all-to-all")


class _Exchange(Function):
    """Sends rows to the ranks of their experts, or sends results back."""

    @staticmethod
    def forward(
        ctx: Any, axis: ExpertAxis, sent: list[int], taken: list[int], scale: float, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.facts = axis, sent, taken, scale
        found = []
        for rows in tensors:
            into = rows.new_empty((sum(taken), *rows.shape[1:]))
            axis.exchange(rows.contiguous().split(sent), into.split(taken))
            found.append(into)
        return tuple(found)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        axis, sent, taken, scale = ctx.facts
        needed = [g * scale for g, wanted in zip(gradients, ctx.needs_input_grad[4:], strict=True) if wanted]
        back = iter(exchanged(axis, taken, sent, 1 / scale, *needed))
        return None, None, None, None, *(next(back) if wanted else None for wanted in ctx.needs_input_grad[4:])


exchanged: Any = _Exchange.apply
"""Exchange rows with the other ranks of the axis, and return the received rows of each tensor."""
AXIS = "expert"


def _check_model(setup: Setup) -> None:
    ranks = setup.plan.expert
    found = list(_experts(setup.model))
    if listed := _list_of_experts(setup.model):
        raise PlanError(
            f"expert={ranks} cannot divide {listed}, whose experts are modules of a list. It divides one module with "
            "parameters of shape (experts, ...), such as transformers' MixtralExperts. Stack their parameters in one "
            f"module, or use data={ranks} or shard={ranks}, which are exact for any mixture of experts."
        )
    if not found:
        raise PlanError(
            f"expert={ranks} finds no experts to divide in {type(setup.model).__name__}. It divides a module with "
            "parameters of shape (experts, ...) whose forward takes (hidden_states, top_k_index, top_k_weights), such "
            f"as transformers' MixtralExperts. Use data={ranks} or shard={ranks}, which are exact for any mixture."
        )
    for name, module, count in found:
        if count % ranks:
            fitting = ", ".join(str(size) for size in range(2, count + 1) if count % size == 0)
            raise PlanError(f"expert={ranks} cannot divide the {count} experts of {name} evenly. Use expert={fitting}.")
        for own, p in parameters_in(module).items():
            if p is not None and p.shape[1] % setup.plan.shard:
                raise PlanError(
                    f"shard={setup.plan.shard} with expert={ranks} divides dim 1 of {name}.{own}, of shape "
                    f"{tuple(p.shape)}, but {p.shape[1]} is no multiple of shard. Use a shard that divides it, or data."
                )


def _experts(model: nn.Module) -> Iterator[tuple[str, nn.Module, int]]:
    """Yield each module of stacked experts, with its name and its number of experts."""
    for name, module in model.named_modules():
        own = [p for p in parameters_in(module).values() if p is not None]
        counts = {len(p) if p.dim() > 1 else 0 for p in own}
        children = any(True for child in module.children() for _ in child.parameters())
        if any(p.dim() == 3 for p in own) and len(counts) == 1 and not children and _layout(module):
            yield name or type(module).__name__, module, counts.pop()


def _list_of_experts(model: nn.Module) -> str:
    """Return the name of a list of modules with "expert" in its name or in their class. Return "" if there is none."""
    for name, module in model.named_modules():
        if isinstance(module, nn.ModuleList | nn.ModuleDict) and len(list(module.children())) > 1:
            words = f"{name.rpartition('.')[2]} {type(module).__name__} {type(next(module.children())).__name__}"
            if "expert" in words.lower() and any(True for _ in module.parameters()) and not any(_experts(module)):
                return name or type(module).__name__
    return ""


def _layout(module: nn.Module) -> str:
    """Return the kind of a forward: with routing "weights", with "sizes" of experts' rows, "even" rows, or ""."""
    names = list(inspect.signature(module.forward).parameters)
    if len(names) > 2 and ("ind" in names[1] or "expert" in names[1]) and "weight" in names[2]:
        return "weights"
    if len(names) == 2 and names[1] in ("expert_size", "expert_sizes", "tokens_per_expert"):
        return "sizes"
    return "even" if names == ["hidden_states"] and "expert" in type(module).__name__.lower() else ""


def _apply(setup: Setup) -> None:
    take_several_meshes()
    mesh = make_mesh(setup.plan, setup.world)
    others = mesh[tuple(name for name in mesh.mesh_dim_names or () if name in ("data", "shard"))]
    along = mesh[AXIS]
    axis = ExpertAxis(along.size(), along.get_local_rank(), along.get_group())
    divided, names = 0, []
    for name, module, count in list(_experts(setup.model)):
        for own, p in list(parameters_in(module).items()):
            if p is not None:
                part = distribute_tensor(p.detach(), along, [Shard(0)], src_data_rank=None)
                new = nn.Parameter(part, p.requires_grad)
                new.__dict__.update(p.__dict__)
                module.register_parameter(own, new)
                divided += p.numel()
        put_forward(module, functools.partial(_run, Experts(name, module, count, axis), module.forward))
        setup.own_parts[module] = others
        names.append(name)
    setup.coupled_gradients = True
    total = sum(p.numel() for p in setup.model.parameters())
    setup.notes.append(
        f"expert={axis.size}: {divided / total:.0%} of the parameters belong to experts and are divided: {some(names)}."
    )


@dataclass(frozen=True)
class Experts:
    """A module of stacked experts. The ranks of `axis` divide the experts evenly, so each rank holds `count /
    axis.size` of them."""

    name: str
    module: nn.Module
    count: int
    axis: ExpertAxis

    @property
    def own(self) -> int:
        """The number of experts that this rank holds."""
        return self.count // self.axis.size


def _run(experts: Experts, forward: Callable[..., Any], /, *given: Any, **named: Any) -> Any:
    """Run the module's forward so that each expert runs on the rank that holds it."""
    bound = inspect.signature(experts.module.forward).bind(*given, **named)
    hidden, *more = bound.arguments.values()
    layout = _layout(experts.module)
    if layout == "weights":
        index, weights = (*more, None, None)[:2]
        _check_given(experts, hidden, index, weights)
        return route(experts, functools.partial(_with_parts, experts, forward), hidden, index, weights)
    sizes = list(map(int, more[0])) if layout == "sizes" else [len(hidden) // experts.count] * experts.count
    if not isinstance(hidden, Tensor) or hidden.dim() != 2 or len(sizes) != experts.count or sum(sizes) != len(hidden):
        raise PlanError(
            f"expert={experts.axis.size}: {experts.name} was called with {sizes} rows for its experts. It needs one "
            f"tensor (tokens, width) with the rows of all {experts.count} experts. Use data or shard instead of expert."
        )
    index = torch.repeat_interleave(torch.tensor(sizes, device=hidden.device)).view(-1, 1)

    def sorted_rows(rows: Tensor, numbers: Tensor, weights: Tensor) -> Tensor:
        order = torch.argsort(numbers.view(-1), stable=True)
        counts = torch.bincount(numbers.view(-1), minlength=experts.own).tolist()
        made = _with_parts(experts, forward, rows[order], *([counts] if layout == "sizes" else []))
        return torch.empty_like(made).index_copy(0, order, made)

    return route(experts, sorted_rows, hidden, index, hidden.new_ones(index.shape))


def _check_given(experts: Experts, hidden: Any, index: Any, weights: Any) -> None:
    tensors = all(isinstance(each, Tensor) for each in (hidden, index, weights))
    if not tensors or index.dim() != 2 or index.shape != weights.shape or len(hidden.flatten(0, -2)) != len(index):
        shapes = [tuple(each.shape) if isinstance(each, Tensor) else each for each in (hidden, index, weights)]
        raise PlanError(
            f"expert={experts.axis.size}: {experts.name} was called with {shapes}. It needs hidden states (tokens, "
            "width), the experts of each token (tokens, k), and the routing weights (tokens, k). Use data or shard."
        )


def _with_parts(experts: Experts, forward: Callable[..., Any], *given: Any) -> Tensor:
    """Run the module's forward as if the module had only the experts that this rank holds."""
    module, held = experts.module, dict(parameters_in(experts.module))
    counts = {n: v for n, v in vars(module).items() if "expert" in n and type(v) is int and v == experts.count}
    local = {name: p.to_local() if isinstance(p, DTensor) else p for name, p in held.items()}
    try:
        parameters_in(module).update(local)
        vars(module).update(dict.fromkeys(counts, experts.own))
        made: Tensor = forward(*given)
    finally:
        parameters_in(module).update(held)
        vars(module).update(counts)
    if len(given[0]) == 0 and torch.is_grad_enabled():  # so that this rank takes part in the other ranks' backward
        nothing = sum(p.reshape(-1)[:0].sum() for p in local.values() if p is not None and p.requires_grad)
        made = made + (sum(each.sum().to(made) for each in given if isinstance(each, Tensor)) + nothing)
    return made


def route(
    experts: Experts, run: Callable[[Tensor, Tensor, Tensor], Tensor], hidden: Tensor, index: Tensor, weights: Tensor
) -> Tensor:
    """Run all experts, each on the rank that holds it, and return the sum of each token's results."""
    axis, flat = experts.axis, index.reshape(-1)
    if flat.numel() and not 0 <= int(flat.min()) <= int(flat.max()) < experts.count:
        raise PlanError(
            f"expert={axis.size}: {experts.name} has {experts.count} experts, but the router chose experts "
            f"{int(flat.min())} to {int(flat.max())}. Use data or shard instead of expert."
        )
    order = torch.argsort(flat, stable=True)
    every = axis.all_gather(torch.bincount(flat, minlength=experts.count)).cpu()
    sent = every[axis.rank].view(axis.size, experts.own).sum(1).tolist()
    mine = every[:, axis.rank * experts.own : (axis.rank + 1) * experts.own]
    taken = mine.sum(1).tolist()
    numbers = torch.arange(experts.own).repeat(axis.size).repeat_interleave(mine.reshape(-1))
    rows = hidden.reshape(-1, hidden.shape[-1])[order // index.shape[1]]
    there, weights = exchanged(axis, sent, taken, axis.size, rows, weights.reshape(-1, 1)[order])
    back: Tensor
    (back,) = exchanged(axis, taken, sent, 1 / axis.size, run(there, numbers.view(-1, 1).to(flat.device), weights))
    in_place = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
    return back[in_place].view(*index.shape, -1).sum(1).view(*hidden.shape[:-1], -1)


EXPERT = Technique(check_model=_check_model, apply=_apply)
