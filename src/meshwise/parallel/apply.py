"""Apply a plan to an ordinary model. The techniques, in their order and with its reason:

    precision    first: later techniques must see the parameters in the dtype that they are stored in
    batch norm   over all ranks: a layer's own forward, which recompute and shard then take as it is
    compile      a block's own forward, as its author wrote it: what the others lay around it is not compiled
    recompute    inside a block: what is sharded gathers a block's parameters once for its second run and its backward
    offload      around the whole model's forward, and inside what shard does before and after that
    shard        after it: a block is gathered around its forward, whatever that forward has become
    start values of a deferred model (deferred.py): once each rank has its part, and before data, which needs them
    data         last: it reduces the gradients of whatever the others have made; with shard, shard does it for both
    zero1        and offload of the optimizer: they need parameters that do not change any more

Tensor and pipeline parallelism will take their places before recompute: they decide what a block is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor, nn
from torch.optim import Optimizer

from meshwise.compat.compiling import uncompile, unwrapped
from meshwise.parallel.batch_norm import join_batch_norms
from meshwise.parallel.compiled import compile_blocks
from meshwise.parallel.data import DataParallel
from meshwise.parallel.deferred import Held, fill, hold
from meshwise.parallel.fits import check_model
from meshwise.parallel.loading import lay_what_a_model_loads, lay_what_an_optimizer_loads
from meshwise.parallel.mesh import make_mesh
from meshwise.parallel.notes import differences, of_compiled, of_contiguous, of_recomputed
from meshwise.parallel.offload import offload_activations
from meshwise.parallel.offload_state import OffloadedState
from meshwise.parallel.precision import gathered_narrow, reduced_in, shard_dtypes, store_parameters
from meshwise.parallel.rebind import names_of, rebind
from meshwise.parallel.recompute import recompute_blocks
from meshwise.parallel.reduction import Reduction
from meshwise.parallel.shard import Sharded
from meshwise.parallel.suitable import lay_contiguously
from meshwise.parallel.zero1 import DividedOptimizer
from meshwise.spec.plan import Plan
from meshwise.spec.world import World
from meshwise.transfer import collectives
from meshwise.transfer.sharded import shard_like


@dataclass(frozen=True)
class Applied:
    """A model under a plan: the same object, and how a backward is run on it.

    reduction: averages gradients over the ranks; None on one device.
    notes: what differs from one device, for the user to read.
    meets: whether ranks' gradients meet inside the backward (batch norms over all ranks), so that each rank's loss must
        be weighed before it, in a unit that all ranks share.
    """

    model: nn.Module
    plan: Plan
    reduction: Reduction | None
    notes: tuple[str, ...] = ()
    meets: bool = False

    def backward(
        self,
        loss: Tensor,
        *,
        reduce: bool = True,
        factor: Callable[[], Tensor] | None = None,
        whole: bool = False,
        value: Tensor | None = None,
    ) -> Tensor | None:
        """The contract of `Reduction.backward`, on one device too."""
        if self.reduction is not None:
            return self.reduction.backward(loss, reduce=reduce, factor=factor, whole=whole, value=value)
        loss.backward()
        if factor is not None:
            scale_gradients(self.model.parameters(), factor())
        return value


def apply(
    model: nn.Module,
    plan: Plan,
    world: World,
    *,
    optimizers: Sequence[Optimizer] = (),
    metered: bool = False,
    counts: Callable[[], bool] | None = None,
) -> Applied:
    """Lay `model` on this rank's device as `plan` says, in place. Start values are those of rank 0. Collective.

    optimizers: made of the model's parameters before; they go on with what the plan makes of them (see `bind`).
    metered: `backward` will be asked for the mean of a value with most losses, so that it should travel along.
    counts: whether what this rank runs now counts, or stands in for no sample. Where it is given, batch norms take the
        statistics of all ranks: forwards in training are then collective.
    """
    was_compiled = uncompile(model)
    check_model(model, plan, world, compiles=plan.compile or was_compiled)
    names = names_of(model)
    held = hold(model)
    store_parameters(model, plan.dtypes)
    if held is None:
        model.to(world.device)
        collectives.broadcast_tensors([*model.parameters(), *model.buffers()])
    joined = join_batch_norms(model, counts) if counts is not None and world.size > 1 else []
    compiled = compile_blocks(unwrapped(model)) if plan.compile or was_compiled else []
    recomputed = recompute_blocks(unwrapped(model), plan.recompute)
    if "activations" in plan.offload:
        offload_activations(model)
    contiguous = lay_contiguously(model) if plan.parameters_divided else []
    reduction = _divided(model, plan, world, held, metered)
    notes = (
        *differences(model, plan, world, bool(joined)),
        *of_contiguous(contiguous),
        *of_compiled(compiled, was_compiled),
        *of_recomputed(recomputed, plan.recompute),
    )
    applied = Applied(model, plan, reduction, notes, bool(joined))
    for optimizer in optimizers:
        rebind(optimizer, names, dict(model.named_parameters()), shard_like)
        bind(applied, optimizer, world)
    return applied


def _divided(model: nn.Module, plan: Plan, world: World, held: Held | None, metered: bool) -> Reduction | None:
    """Shard the model or reduce its gradients; a deferred model gets its start values in between."""
    sharded = _sharded(model, plan, world) if plan.parameters_divided else None
    if held is not None:
        fill(held, model, world.device, parts="cpu" if "parameters" in plan.offload else world.device)
    if sharded is not None or world.size == 1:
        return sharded
    return reduction_of(dict(model.named_parameters()), plan, metered=metered)


def reduction_of(named: Mapping[str, nn.Parameter], plan: Plan, *, metered: bool = False) -> Reduction:
    """What averages the gradients of replicated parameters, of one model or of several."""
    dtype = reduced_in(plan.dtypes)
    return DataParallel(list(named.items()), bucket_mb=plan.bucket_mb, metered=metered, dtype=dtype)


def _sharded(model: nn.Module, plan: Plan, world: World) -> Sharded:
    sharded = Sharded(
        model,
        make_mesh(plan, world),
        reshard=plan.reshard,
        to_host="parameters" in plan.offload,
        dtypes=shard_dtypes(plan.dtypes),
        narrow=gathered_narrow(model),
    )
    lay_what_a_model_loads(model)
    return sharded


def bind(applied: Applied, optimizer: Optimizer, world: World) -> None:
    """Lay an optimizer of the applied model's parameters as the plan says: needed once for one made after `apply`."""
    if applied.plan.parameters_divided:
        lay_what_an_optimizer_loads(optimizer)
    if applied.plan.zero1:
        DividedOptimizer(optimizer, world.rank, world.size)
    if "optimizer" in applied.plan.offload and "parameters" not in applied.plan.offload:  # those take it with them
        OffloadedState(optimizer)


def scale_gradients(parameters: Iterable[Tensor], factor: Tensor) -> None:
    """Multiply the gradient of every parameter by a scalar, in place."""
    for p in parameters:
        if p.grad is not None:
            p.grad.mul_(factor.to(p.grad.dtype))
