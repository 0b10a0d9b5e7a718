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

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor, nn
from torch.optim import Optimizer

from meshwise.compat.compiling import inside, uncompile
from meshwise.parallel.batch_norm import join_batch_norms
from meshwise.parallel.compiled import check_can_compile, compile_blocks
from meshwise.parallel.data import DataParallel
from meshwise.parallel.deferred import fill, hold
from meshwise.parallel.loading import lay_what_a_model_loads, lay_what_an_optimizer_loads
from meshwise.parallel.mesh import make_mesh
from meshwise.parallel.offload import offload_activations
from meshwise.parallel.offload_state import OffloadedState
from meshwise.parallel.precision import check_computes, gathered_narrow, reduced_in, shard_dtypes, store_parameters
from meshwise.parallel.rebind import names_of, rebind
from meshwise.parallel.recompute import recompute_blocks
from meshwise.parallel.reduction import Reduction
from meshwise.parallel.shard import Sharded
from meshwise.parallel.suitable import check_can_be_divided, lay_contiguously
from meshwise.parallel.zero1 import DividedOptimizer
from meshwise.spec.errors import PlanError
from meshwise.spec.plan import Plan, changed, check_devices
from meshwise.spec.world import World
from meshwise.transfer import collectives
from meshwise.transfer.layout import lay_as

DTYPES = {"precision", "param_dtype", "compute_dtype", "grad_dtype"}
BUILT = {"data", "shard", "accumulate", "zero1", "recompute", "offload", "reshard", "bucket_mb", "compile"} | DTYPES
"""The fields of a plan that `apply` carries out; a plan that says something with another one is refused."""


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
            scale_gradients(self.model, factor())
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
    _check(model, plan, world, plan.compile or was_compiled)
    names = names_of(model)
    held = hold(model)
    store_parameters(model, plan.dtypes)
    if held is None:
        model.to(world.device)
        collectives.broadcast_tensors([*model.parameters(), *model.buffers()])
    joined = join_batch_norms(model, counts) if counts is not None and world.size > 1 else []
    compiled = compile_blocks(inside(model)) if plan.compile or was_compiled else []
    blocks = recompute_blocks(inside(model), plan.recompute)
    if "activations" in plan.offload:
        offload_activations(model)
    reduction: Reduction | None = None
    moved = lay_contiguously(model) if plan.shard > 1 else []
    if plan.shard > 1:
        reduction = Sharded(
            model,
            make_mesh(plan, world),
            reshard=plan.reshard,
            to_host="parameters" in plan.offload,
            dtypes=shard_dtypes(plan.dtypes),
            narrow=gathered_narrow(model),
        )
        lay_what_a_model_loads(model)
    if held is not None:
        fill(held, model, world.device, parts="cpu" if "parameters" in plan.offload else world.device)
    if plan.shard == 1 and world.size > 1:
        named = list(model.named_parameters())
        dtype = reduced_in(plan.dtypes)
        reduction = DataParallel(named, bucket_mb=plan.bucket_mb, metered=metered, dtype=dtype)
    notes = differences(model, plan, world, bool(joined))
    if moved:
        notes += (f"shard: {_some(moved)} lie contiguously now, as parts must; transposed or channels_last is undone.",)
    notes += (*_compiled(compiled, was_compiled), *_recomputed(plan, blocks))
    applied = Applied(model, plan, reduction, notes, bool(joined))
    for optimizer in optimizers:
        rebind(optimizer, names, model, lay_as)
        bind(applied, optimizer, world)
    return applied


def bind(applied: Applied, optimizer: Optimizer, world: World) -> None:
    """Lay an optimizer of the applied model's parameters as the plan says: needed once for one made after `apply`."""
    if applied.plan.shard > 1:
        lay_what_an_optimizer_loads(optimizer)
    if applied.plan.zero1:
        DividedOptimizer(optimizer, world.rank, world.size)
    if "optimizer" in applied.plan.offload and "parameters" not in applied.plan.offload:  # those take it with them
        OffloadedState(optimizer)


def _compiled(blocks: Sequence[str], whole: bool) -> tuple[str, ...]:
    if not blocks:
        return ()
    before = "torch.compile was laid over the model, and is taken off: " if whole else ""
    return (f"compile: {before}each of {len(blocks)} blocks is compiled by itself: {_some(blocks)}.",)


def _some(blocks: Sequence[str]) -> str:
    return ", ".join(name or "the whole model" for name in blocks[:3]) + (" and so on" if len(blocks) > 3 else "")


def _recomputed(plan: Plan, blocks: Sequence[str]) -> tuple[str, ...]:
    if not blocks:
        return ()
    kept = "all but matrix products and attention" if plan.recompute == "selective" else "all of it"
    return (f"recompute: {kept} runs again in the backward, in {len(blocks)} blocks: {_some(blocks)}.",)


def differences(model: nn.Module, plan: Plan, world: World, joined: bool = False) -> tuple[str, ...]:
    """What a model under a plan does not do as on one device with whole batches, a sentence each."""
    kinds = " ".join({type(module).__name__ for module in model.modules()})
    notes = []
    if "BatchNorm" in kinds and not joined and world.size > 1:
        notes.append("batch norm: each rank takes the statistics of its own share, so numbers are not one device's.")
    if "BatchNorm" in kinds and plan.accumulate > 1:
        notes.append(
            f"batch norm: accumulate={plan.accumulate} takes the statistics of each microbatch by itself, so numbers "
            "are not those of accumulate=1 (they are alike on any number of devices)."
        )
    if "Dropout" in kinds and world.size > 1:
        notes.append("dropout: each rank draws its own masks, keyed by (seed, step, rank).")
    return tuple(notes)


def check_fits(plan: Plan, world: World) -> None:
    """Raises PlanError when the plan needs another number of devices than the run has, or what is not
    built."""
    check_devices(plan, world.size)
    _check_built(plan)
    _check_offload(plan)
    if plan.compile:
        check_can_compile(world.device)
    if world.kind == "cpu":  # the process that starts workers leaves GPUs alone
        check_computes(None, world.device, plan.dtypes)


def _check(model: nn.Module, plan: Plan, world: World, compiles: bool) -> None:
    check_devices(plan, world.size)
    _check_built(plan)
    _check_offload(plan)
    check_computes(model, world.device, plan.dtypes)
    if world.size > 1:
        check_can_be_divided(model)
    if compiles:
        check_can_compile(world.device)


def _check_offload(plan: Plan) -> None:
    if "parameters" in plan.offload and plan.shard == 1:
        raise PlanError(
            "offload='parameters' keeps each rank's part of the parameters in the host's memory, and shard=1 makes no "
            "parts. Use shard=2 or more, or offload='optimizer'."
        )


def _check_built(plan: Plan) -> None:
    for name, value in changed(plan).items():
        if name not in BUILT:
            raise PlanError(f"{name}={value!r} is not built yet. Leave {name} out.")


def scale_gradients(model: nn.Module, factor: Tensor) -> None:
    """Multiply every gradient of `model` by a scalar, in place."""
    for p in model.parameters():
        if p.grad is not None:
            p.grad.mul_(factor.to(p.grad.dtype))
