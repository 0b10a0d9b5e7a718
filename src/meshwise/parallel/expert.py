"""Expert parallel: each rank of the axis holds some of the experts of a mixture of experts, and has samples of its own.

Experts are a module whose parameters are stacked, (experts, ...) each, and whose forward takes hidden states, the
experts of each token and their weights, as in transformers. Its parameters become DTensors on the mesh axis `expert`,
of which each rank holds consecutive experts. Rows of hidden states, one for each token and expert, travel to the rank
that has the expert, where the module's own forward runs on them; what it gives travels back, and is added up (GShard,
arXiv:2006.16668). No line of the model changes.

An expert's gradient comes from the tokens of all ranks of the axis. It is divided by their number as it comes in, so
that it is the mean over them, and only the other axes remain to be reduced over. All other parameters are replicated
over the axis, and are reduced over it as over `data` (shard.py).

Tested in tests/parallel/test_experts.py.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.function import Function
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from meshwise.compat.modules import parameters_in, put_forward
from meshwise.compat.several_meshes import take_several_meshes
from meshwise.parallel.mesh import make_mesh
from meshwise.parallel.technique import Setup, Technique
from meshwise.spec.errors import PlanError
from meshwise.spec.words import some
from meshwise.transfer import collectives

AXIS = "expert"


class Axis(Protocol):
    """The ranks over which experts are divided, and how they exchange rows."""

    @property
    def size(self) -> int: ...

    @property
    def rank(self) -> int: ...

    def all_gather(self, tensor: Tensor) -> Tensor:
        """`tensor` of every rank, stacked."""

    def exchange(self, sent: Sequence[Tensor], taken: Sequence[Tensor]) -> None:
        """Send `sent[r]` to rank r, and write what it sends into `taken[r]`; each of rows, maybe none."""


@dataclass(frozen=True)
class MeshAxis:
    """The axis of the device mesh. group: its ranks with this one among them."""

    size: int
    rank: int
    group: collectives.Group

    def all_gather(self, tensor: Tensor) -> Tensor:
        return collectives.all_gather(tensor, self.group, of="tokens of experts")

    def exchange(self, sent: Sequence[Tensor], taken: Sequence[Tensor]) -> None:
        taken[self.rank].copy_(sent[self.rank])
        sends = [(rows, r) for r, rows in enumerate(sent) if r != self.rank and len(rows)]
        receives = [(rows, r) for r, rows in enumerate(taken) if r != self.rank and len(rows)]
        if sends or receives:
            collectives.send_receive(sends, receives, self.group, "all-to-all")


def _check_model(setup: Setup) -> None:
    ranks = setup.plan.expert
    if ranks == 1:
        return
    found = list(_experts(setup.model))
    if not found:
        raise PlanError(
            f"expert={ranks} divides experts: a module with stacked parameters, (experts, ...) each, whose forward "
            "takes (hidden_states, top_k_index, top_k_weights), as transformers' MixtralExperts. "
            f"{type(setup.model).__name__} has none. Any other mixture of experts is exact under data={ranks} and "
            f"shard={ranks}."
        )
    for name, module, count in found:
        if count % ranks:
            fitting = ", ".join(str(size) for size in range(2, count + 1) if count % size == 0)
            raise PlanError(f"expert={ranks} does not divide the {count} experts of {name}. Use expert={fitting}.")
        for own, p in parameters_in(module).items():
            if p is not None and p.shape[1] % setup.plan.shard:
                raise PlanError(
                    f"shard={setup.plan.shard} with expert={ranks} divides dim 1 of {name}.{own}, of shape "
                    f"{tuple(p.shape)}, which has {p.shape[1]}. Use a shard that divides it, or data."
                )


def _experts(model: nn.Module) -> Iterator[tuple[str, nn.Module, int]]:
    """The modules of stacked experts, by name, and how many experts each has."""
    for name, module in model.named_modules():
        own = [p for p in parameters_in(module).values() if p is not None]
        counts = {len(p) if p.dim() > 1 else 0 for p in own}
        children = any(True for child in module.children() for _ in child.parameters())
        if any(p.dim() == 3 for p in own) and len(counts) == 1 and not children and _takes_indices(module):
            yield name or type(module).__name__, module, counts.pop()


def _takes_indices(module: nn.Module) -> bool:
    """Whether the forward takes hidden states, the experts of each token, and their weights."""
    names = list(inspect.signature(module.forward).parameters)[:3]
    return len(names) == 3 and ("ind" in names[1] or "expert" in names[1]) and "weight" in names[2]


def _apply(setup: Setup) -> None:
    if setup.plan.expert == 1:
        return
    take_several_meshes()
    mesh = make_mesh(setup.plan, setup.world)
    others = mesh[tuple(name for name in mesh.mesh_dim_names or () if name in ("data", "shard"))]
    along = mesh[AXIS]
    axis = MeshAxis(along.size(), along.get_local_rank(), along.get_group())
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
        f"expert={axis.size}: {divided / total:.0%} of the parameters are experts' and divided, {some(names)}."
    )


@dataclass(frozen=True)
class Experts:
    """A module of stacked experts, by name, of which each rank of the axis has `count / axis.size`."""

    name: str
    module: nn.Module
    count: int
    axis: Axis

    @property
    def own(self) -> int:
        """How many experts this rank has."""
        return self.count // self.axis.size


def _run(experts: Experts, forward: Callable[..., Any], /, *given: Any, **named: Any) -> Any:
    """The module's forward, with the experts where they are."""
    bound = inspect.signature(experts.module.forward).bind(*given, **named)
    values = list(bound.arguments.values())
    hidden, index, weights = (values + [None] * 3)[:3]
    _check_given(experts, hidden, index, weights)
    return route(experts, functools.partial(_with_parts, experts, forward), hidden, index, weights)


def _check_given(experts: Experts, hidden: Any, index: Any, weights: Any) -> None:
    tensors = all(isinstance(each, Tensor) for each in (hidden, index, weights))
    if not tensors or index.dim() != 2 or index.shape != weights.shape or len(hidden.flatten(0, -2)) != len(index):
        shapes = [tuple(each.shape) if isinstance(each, Tensor) else each for each in (hidden, index, weights)]
        raise PlanError(
            f"expert={experts.axis.size}: {experts.name} was given {shapes}, and needs hidden states (tokens, width), "
            "the experts of each token (tokens, k), and their weights (tokens, k). Use data or shard."
        )


def _with_parts(experts: Experts, forward: Callable[..., Any], *given: Tensor) -> Tensor:
    """The module's forward, as a module of this rank's experts alone."""
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
    if len(given[0]) == 0 and torch.is_grad_enabled():  # its part in the backward of the others
        nothing = sum(p.reshape(-1)[:0].sum() for p in local.values() if p is not None and p.requires_grad)
        made = made + (given[0].sum() + given[2].sum().to(made) + nothing)
    return made


def route(
    experts: Experts, run: Callable[[Tensor, Tensor, Tensor], Tensor], hidden: Tensor, index: Tensor, weights: Tensor
) -> Tensor:
    """What `run` gives of all experts, each on the rank that has it. Collective, and so is its backward.

    run: takes rows (R, width) of this rank's experts, which expert of it (R, 1) and weights (R, 1); gives (R, width).
    hidden: (..., width). index, weights: of each token (tokens, k).
    """
    axis, flat = experts.axis, index.reshape(-1)
    if flat.numel() and not 0 <= int(flat.min()) <= int(flat.max()) < experts.count:
        raise PlanError(
            f"expert={axis.size}: {experts.name} has {experts.count} experts, and a token was given to expert "
            f"{int(flat.max())}. Use data or shard."
        )
    order = torch.argsort(flat, stable=True)
    every = axis.all_gather(torch.bincount(flat, minlength=experts.count)).cpu()
    sent = every[axis.rank].view(axis.size, experts.own).sum(1).tolist()
    mine = every[:, axis.rank * experts.own : (axis.rank + 1) * experts.own]
    taken = mine.sum(1).tolist()
    numbers = torch.arange(experts.own).repeat(axis.size).repeat_interleave(mine.reshape(-1))
    rows = hidden.reshape(-1, hidden.shape[-1])[order // index.shape[1]]
    there, weights = _exchanged(axis, sent, taken, axis.size, rows, weights.reshape(-1, 1)[order])
    (back,) = _exchanged(axis, taken, sent, 1 / axis.size, run(there, numbers.view(-1, 1).to(flat.device), weights))
    in_place = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
    return back[in_place].view(*index.shape, -1).sum(1).view(*hidden.shape[:-1], -1)


def _exchanged(axis: Axis, sent: list[int], taken: list[int], scale: float, *tensors: Tensor) -> tuple[Tensor, ...]:
    function: Any = _Exchange
    found: tuple[Tensor, ...] = function.apply(axis, sent, taken, scale, *tensors)
    return found


class _Exchange(Function):
    """Rows to the ranks that have their experts, or back. sent, taken: how many go to each rank, and come from it.
    scale: what gradients are multiplied by as they come back."""

    @staticmethod
    def forward(
        ctx: Any, axis: Axis, sent: list[int], taken: list[int], scale: float, *tensors: Tensor
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
        back = iter(_exchanged(axis, taken, sent, 1 / scale, *needed))
        return None, None, None, None, *(next(back) if wanted else None for wanted in ctx.needs_input_grad[4:])


EXPERT = Technique(check_model=_check_model, apply=_apply)
