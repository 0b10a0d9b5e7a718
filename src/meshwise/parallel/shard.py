"""Shard parameters, gradients and optimizer state over ranks.

Each rank holds a part of each of them.

`fully_shard` gathers a block's parameters before the block's forward and backward, and leaves in `.grad` this rank's
part of the mean over all ranks. Blocks are the model's repeated layers. All other parameters, and layers that are too
small to be worth a collective, belong to the whole model: they are gathered before the model's forward, and kept until
the backward is over.

Every rank must run the same blocks in the same order. This is checked before each reduction, and a rank that diverges
raises an error instead of waiting in a collective. Within a block, ranks may use different parameters: a parameter that
this rank's loss does not reach contributes zero, and a parameter that no rank reaches keeps its `grad`.

Gradient clipping needs no code here: `.grad` is a DTensor, so `torch.nn.utils.clip_grad_norm_` reduces the norm over
all ranks, and every rank multiplies its part by the same factor. When the program reads values of a parameter, it gets
the values of the whole (torch_compat/whole_values.py), if all ranks read them (transfer/reading.py).
"""

from __future__ import annotations

import functools
import itertools
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.optim import Optimizer

from meshwise.parallel.mesh import WITHIN_SAMPLES, make_mesh, mesh_of_stage
from meshwise.parallel.rebind import register_model_load_hooks, register_optimizer_load_hook
from meshwise.parallel.shard_refusals import FIRST, GRACE, GatherOrder, check_steps_on_parts, meet_without_forward
from meshwise.parallel.shard_units import (
    called_by_all,
    check_can_be_sharded,
    leave_in_order,
    make_contiguous,
    roots_of,
    units_of,
    watch_forward,
)
from meshwise.parallel.single_numbers import SingleNumbers
from meshwise.parallel.skipped import parameters_that_may_be_skipped
from meshwise.parallel.technique import SKIPPED, Setup, Technique
from meshwise.spec.errors import PlanError
from meshwise.spec.plan import Plan
from meshwise.spec.words import some
from meshwise.spec.world import World
from meshwise.torch_compat import sharding
from meshwise.torch_compat.modules import generates_together, hooks_at_forward, put_around_methods, put_forward
from meshwise.torch_compat.reducer import default_store
from meshwise.torch_compat.whole_values import plain_loss, read_whole
from meshwise.transfer import collectives, stages
from meshwise.transfer.reading import agree, look_out, meet, someone_is_past, together

_made = itertools.count()  # numbers the models: every rank shards them in the same order


class Sharded:
    """Shards a model's parameters over the ranks of a mesh, and runs the backward of each loss. The mesh has the axis
    `shard`. It may have an outer axis `data`, over which the shards are replicated."""

    def __init__(self, setup: Setup) -> None:
        model, reshard, self._each = setup.model, setup.plan.reshard, setup.plan.reduce_each
        mesh = make_mesh(setup.plan, setup.world, replicas=True)
        kept = tuple(name for name in mesh.mesh_dim_names or () if name not in WITHIN_SAMPLES)
        self.mesh = mesh = mesh[kept] if len(kept) < mesh.ndim else mesh
        pin = torch.accelerator.is_available()  # memory can only be pinned with an accelerator
        policy = CPUOffloadPolicy(pin_memory=pin) if setup.parts_on_host else OffloadPolicy()
        dtypes = setup.gather_dtypes or MixedPrecisionPolicy()
        self._mixed = dtypes.param_dtype is not None
        wide = {name for name, p in model.named_parameters() if id(p) not in setup.gathered_narrow}
        self._roots: list[FSDPModule] = []
        self._by_method = set[FSDPModule]()  # roots used by a method other than forward since the last backward
        self._key = f"meshwise/shard/{next(_made)}/{collectives.group_key()}"
        self._skipped = parameters_that_may_be_skipped(model, roots_of(model))
        self._staged = setup.plan.pipeline > 1
        absent = stages.absent_parameters(model)
        self.whole_mesh = mesh_of_stage(setup.plan, setup.world)
        """The mesh of all ranks of this pipeline stage. It may have axes that `mesh` lacks, such as `tensor`."""
        self._own_numbers = list[SingleNumbers]()  # the scalar parameters, as one entry, if there are any
        if not (self._staged or setup.parts_on_host):
            absent = absent | self._take_numbers(SingleNumbers(model, self.whole_mesh, absent), setup)
        for root in roots_of(model):
            parts = [module for module in root.modules() if module in setup.own_parts]
            units = [unit for unit in units_of(root) if unit not in parts and absent.isdisjoint(unit.parameters())]
            units, unsure, said = (units, [], []) if self._staged else called_by_all(root, units)
            setup.notes += said
            for module, keep in [*((unit, not reshard) for unit in parts + units), (root, bool(units) or not reshard)]:
                check_can_be_sharded(model, module, absent)
                # The first dim of stacked experts is already divided over ranks, so divide the second.
                fully_shard(
                    module,
                    mesh=setup.own_parts.get(module, mesh),
                    shard_placement_fn=(lambda _: Shard(1)) if module in parts else None,
                    reshard_after_forward=not keep,
                    offload_policy=policy,
                    mp_policy=dtypes,
                    ignored_params=absent,
                )
                sharding.mend_sharded_class(module)
                watch_forward(module)
                hooks_at_forward(module)
            if unsure:
                GatherOrder(root, unsure, f"{self._key}/{len(self._roots)}")
            self._roots.append(root)  # type: ignore[arg-type]
            if self._staged:
                put_forward(root, functools.partial(leave_in_order, self._roots[-1], root.forward))
            else:
                around = functools.partial(sharding.around_method, self._roots[-1], self._ran_by_method)
                put_around_methods(root, around)
        self._take_groups(model, wide)
        self._agreed: set[int] = set()
        self._idle: set[str] | None = None
        self._so_far = self._passed = self._asked = self._backwards = 0
        self._met = False  # whether the first backward is over, in which ranks wait up to FIRST seconds for each other
        self._reached, self._filled = set[str](), dict[str, list[str]]()
        self._factor: Callable[[], Tensor] | None = None
        self._noticed, self._reached_past_blocks = set[str](), set[str]()
        self.unreduced = self.shared_terms = False

    def _take_numbers(self, numbers: SingleNumbers, setup: Setup) -> set[nn.Parameter]:
        if numbers.places:
            self._own_numbers.append(numbers)
            setup.notes.append(f"shard: every rank keeps single numbers whole: {some(list(numbers.places))}.")
        return {module.get_parameter(own) for module, own in numbers.places.values()}

    def _take_groups(self, model: nn.Module, wide: set[str]) -> None:
        names = {id(p): name for name, p in model.named_parameters()}
        self._groups, self._names = list[sharding.Group](), dict[int, list[str]]()
        for _, sharded in sharding.sharded_modules(model):
            for group in sharding.groups_of(sharded):
                self._names[len(self._groups)] = [names[id(p)] for p in group.parameters]
                if self._mixed:
                    group.gather_as_stored([i for i, name in enumerate(self._names[len(self._groups)]) if name in wide])
                group.around_collectives(collectives.recorded)
                group.before_reducing(functools.partial(self._before, len(self._groups)))
                self._groups.append(group)

    def _waiting(self) -> Iterator[Tensor]:
        """Yield the gradients of this rank that have not been reduced yet."""
        for group in self._groups:
            yield from group.waiting()
        for numbers in self._own_numbers:
            yield from numbers.waiting()

    def _ran_by_method(self, root: FSDPModule) -> None:
        if torch.is_grad_enabled():
            self._by_method.add(root)

    def backward(
        self,
        loss: Tensor,
        *,
        reduce: bool = True,
        factor: Callable[[], Tensor] | None = None,
        whole: bool = False,
        value: Tensor | None = None,
        run: Callable[..., None] | None = None,
    ) -> Tensor | None:
        """Run the backward of `loss`, and add this rank's shard of the mean gradients to `grad`."""
        if self._staged:
            self._backward_of_stage(loss, factor if reduce else None)
            return None
        reduce = reduce or self._each
        self._start()
        fresh = {name for name, p in self._parameters() if p.grad is None}
        if factor is not None:
            if whole:
                self._multiply_reduced(factor)
            if reduce and (whole or not self.unreduced):
                self._factor = factor
            else:
                loss = loss * factor().to(loss.dtype)
                for gradient in self._waiting() if whole else ():
                    gradient.mul_(factor().to(gradient.dtype))
        for root in self._roots:
            root.set_requires_gradient_sync(reduce)
        mean = None if value is None else collectives.begin_sum(value / collectives.world_size(), of="the loss")
        for root in self._by_method:
            sharding.begin_backward_at(root, loss)
        self._by_method.clear()
        with together():
            (run or torch.autograd.backward)((loss,))
        for numbers in self._own_numbers if reduce else ():
            numbers.reduce(self.weighed)
        self._factor = None
        if reduce:
            self._finish(fresh)
            self.unreduced = self.unreduced and any(group.waiting() for group in self._groups)
        else:
            self.unreduced = True
        return None if mean is None else mean.wait()

    def _backward_of_stage(self, loss: Tensor, factor: Callable[[], Tensor] | None) -> None:
        """Run the backward of one microbatch in a pipeline stage."""
        self._factor, self.unreduced = factor, True
        for root in self._roots:
            root.set_requires_gradient_sync(False)
            root.set_reshard_after_backward(False, recurse=False)
        loss.backward()

    def let_go(self, names: set[str]) -> list[Any]:
        """Implement `Setup.let_go`: free the shards of the parameters in `names`."""
        found = []
        for index, group in enumerate(self._groups):
            places = [place for place, name in enumerate(self._names[index]) if name in names]
            found += group.let_go(places)
            self._names[index] = [name for name in self._names[index] if name not in names]
        for root in self._roots:
            sharding.without_empty_groups(root)
        return found

    def plain(self, loss: Tensor) -> Tensor:
        """Return the loss as a plain tensor."""
        meet_without_forward([] if self._staged else self._groups)
        with together():
            plain = plain_loss(loss, self.whole_mesh)
        self.shared_terms = self.shared_terms or plain is not None
        return loss if plain is None else plain

    def weighed(self, gradient: Tensor) -> Tensor:
        """Multiply a gradient by the result of `factor`, the argument of the current `backward`, and return the
        product. If there is no `factor`, return the gradient unchanged."""
        return gradient if self._factor is None else gradient * self._factor().to(gradient.dtype)

    def reduce_now(self) -> None:
        """Reduce the gradients of this rank that earlier backwards have left unreduced. Collective."""
        self._start()
        fresh = {name for name, p in self._parameters() if p.grad is None}
        for root in self._roots if self._staged else ():
            root.set_reshard_after_backward(True, recurse=False)
        for group in self._groups:
            if group.gathered:
                group.reduce_now()
        for numbers in self._own_numbers:
            numbers.reduce(self.weighed)
        self._finish(fresh)
        self.unreduced, self._factor = False, None

    def close(self) -> None:
        """Do nothing."""

    def _start(self) -> None:
        self._backwards += 1
        self._so_far, self._passed, self._asked, self._reached, self._filled = 0, 0, 0, set(), {}
        self._reached_past_blocks.clear()
        for name, p in self._parameters():  # not in `__init__`: parameters may be replaced or unfrozen later
            if p.requires_grad and name not in self._noticed:
                self._noticed.add(name)
                p.register_hook(functools.partial(self._note_reached, name, getattr(p, "placements", None)))

    def _note_reached(self, name: str, placements: Any, gradient: Tensor) -> Tensor | None:
        """Record that the loss depends on parameter `name`. Return the gradient in `placements` if it has others."""
        self._reached_past_blocks.add(name)
        other = isinstance(gradient, DTensor) and placements and gradient.placements != placements
        return gradient.redistribute(placements=placements) if other else None  # type: ignore[attr-defined]

    def _before(self, index: int, group: sharding.Group) -> None:
        """Prepare the gradients of a group of parameters for their reduction."""
        reached = dict(zip(self._names[index], group.reached(), strict=True))
        trained = {name for name, p in zip(self._names[index], group.parameters, strict=True) if p.requires_grad}
        if not any(reached.values()) and self._idle is not None and self._idle >= trained:
            return
        self._agree_on_order(index)
        late = sorted(name for name in self._idle or () if reached.get(name))
        if late and self._idle is not None:
            self._agree(f"uses {', '.join(late)} for the first time")
            self._idle.difference_update(late)
        self._reached.update(name for name, there in reached.items() if there)
        for place, name in enumerate(self._names[index]):
            if name in trained and not reached[name] and name not in (self._idle or ()):
                group.fill(place)
                self._count(name)
        if self._mixed:
            group.in_one_dtype()
        if self._factor is not None:
            for gradient in group.waiting():
                gradient.mul_(self._factor().to(gradient.dtype))

    def _agree_on_order(self, index: int) -> None:
        self._so_far = hash((self._so_far, index))
        if self._so_far not in self._agreed:
            where = f"computes gradients in the block of {self._names[index][0]}" if index >= 0 else "ends its backward"
            self._agree(f"{where} after {self._passed} blocks")
            self._agreed.add(self._so_far)
        self._passed += 1

    def _agree(self, what: str) -> None:
        """Raise PlanError if the text `what` differs between the ranks, before a collective."""
        self._asked += 1
        key, grace = f"{self._key}/{self._backwards}/{self._asked}", GRACE if self._met else FIRST
        other = agree(key, what, collectives.world_size(), grace, someone_is_past)
        if other is not None:
            others = f"another rank differs: {other}" if other else "other ranks do not"
            raise PlanError(
                f"backward {self._backwards}: this rank {what}, and {others}. All ranks must gather sharded parameters "
                "together: run the same blocks on every rank in the same step, or use data parallelism (shard=1). "
                f"{SKIPPED}"
            )

    def _count(self, name: str) -> None:
        """Record that parameter `name` got no gradient on this rank in this backward."""
        key = f"{self._key}/unused/{self._backwards}/{name}/{len(self._filled.get(name, []))}"
        self._filled.setdefault(name, []).append(key)
        default_store().add(key, 1)

    def _parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield every parameter with its name."""
        for index, group in enumerate(self._groups):
            yield from zip(self._names[index], group.parameters, strict=True)
        for numbers in self._own_numbers:
            for name, (module, own) in numbers.places.items():
                yield name, module.get_parameter(own)

    def _finish(self, fresh: set[str]) -> None:
        """End a backward: drop the zero gradients of parameters that no rank's loss has reached."""
        self._agree_on_order(-1)
        self._met = True
        unreached = {name: keys for name, keys in self._filled.items() if name not in self._reached}
        if self._idle is None:
            everyone = collectives.gather_objects(sorted(unreached))
            nowhere = set.intersection(*map(set, everyone))
            self._idle = nowhere - self._skipped
        elif unreached:
            if torch.accelerator.is_available():
                torch.accelerator.synchronize()  # once the reductions have ended, all ranks have called `_count`
            size = collectives.world_size()
            nowhere = {name for name, keys in unreached.items() if all(default_store().add(k, 0) == size for k in keys)}
        else:
            return
        for name, p in self._parameters():
            if name in nowhere & fresh - self._reached_past_blocks:
                p.grad = None

    def _multiply_reduced(self, factor: Callable[[], Tensor]) -> None:
        """Multiply each gradient that was reduced in an earlier backward by the mean of `factor()` over the ranks."""
        reduced = [p.grad for _, p in self._parameters() if p.grad is not None]
        if reduced:
            mean = collectives.all_reduce_mean(factor().detach().clone(), of="the loss")
            for gradient in reduced:
                gradient.mul_(mean.to(gradient.dtype))


def _apply(setup: Setup) -> None:
    plan = setup.plan
    if plan.data * plan.expert * plan.shard == 1:  # tensor alone
        return
    generates_together(setup.model)
    setup.notes += make_contiguous(setup.model)
    sharded = setup.reduction = Sharded(setup)
    setup.coupled_gradients |= plan.reduce_each  # gradients reduced before all loss weights are known need one scale
    of_model = weakref.ref(sharded)
    setup.let_go = lambda names: [] if (held := of_model()) is None else held.let_go(names)
    register_model_load_hooks(setup.model)
    held = (p.device_mesh for p in setup.model.parameters() if isinstance(p, DTensor))
    for mesh in dict.fromkeys([sharded.whole_mesh, *held]):
        read_whole(mesh, meet, sharded.weighed)
    look_out()


def _bind(optimizer: Optimizer, plan: Plan, world: World) -> None:
    check_steps_on_parts(optimizer)
    register_optimizer_load_hook(optimizer)


SHARD = Technique(apply=_apply, bind=_bind)
