"""Apply a plan to an ordinary model. The techniques, in their order and with its reason:

    precision    first: later techniques must see the parameters in the dtype that they are stored in
    placement    on the device, with the start values of rank 0; those of a deferred model come later
    batch norm   over all ranks: a layer's own forward, which recompute and shard then take as it is
    compile      a block's own forward, as its author wrote it: what others put around it is not compiled
    recompute    inside a block: what is sharded gathers a block's parameters once for its second run and its backward
    offload      around the whole model's forward, and inside what shard does before and after that
    shard        after it: a block is gathered around its forward, whatever that forward has become
    start values of a deferred model (deferred.py): once each rank has its part, and before data, which needs them
    data         last: it reduces the gradients of whatever the others have made; with shard, shard does it for both
    zero1        and offload of the optimizer: they need parameters that do not change any more

Tensor and pipeline parallelism will take their places before recompute: they decide what a block is. A technique is a
field of the plan, a file of its own (`technique.py` says what is in it), and its place in `TECHNIQUES`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor, nn
from torch.optim import Optimizer

from meshwise.compat.compiling import uncompile
from meshwise.parallel.batch_norm import BATCH_NORM
from meshwise.parallel.compiled import COMPILE
from meshwise.parallel.data import DATA, DataParallel
from meshwise.parallel.deferred import PLACEMENT, START_VALUES, take_fakes
from meshwise.parallel.offload import OFFLOAD
from meshwise.parallel.offload_state import OFFLOAD_STATE
from meshwise.parallel.precision import PRECISION, reduced_in
from meshwise.parallel.rebind import names_of, rebind
from meshwise.parallel.recompute import RECOMPUTE
from meshwise.parallel.reduction import Reduction
from meshwise.parallel.shard import SHARD
from meshwise.parallel.technique import Setup
from meshwise.parallel.zero1 import ZERO1
from meshwise.spec.plan import Plan
from meshwise.spec.plan_devices import check_devices
from meshwise.spec.world import World

TECHNIQUES = (
    PRECISION,
    PLACEMENT,
    BATCH_NORM,
    COMPILE,
    RECOMPUTE,
    OFFLOAD,
    SHARD,
    START_VALUES,
    DATA,
    ZERO1,
    OFFLOAD_STATE,
)


@dataclass(frozen=True)
class Applied:
    """A model under a plan: the same object, and how a backward is run on it.

    reduction: averages gradients over the ranks; None on one device.
    notes: what differs from one device, for the user to read.
    coupled_gradients: whether a rank's gradients depend on other ranks inside the backward (batch norms over all
        ranks), so that each rank's loss must be weighed before it, in a unit that all ranks share.
    """

    model: nn.Module
    plan: Plan
    reduction: Reduction | None
    notes: tuple[str, ...] = ()
    coupled_gradients: bool = False

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


def check_fits(plan: Plan, world: World) -> None:
    """Raises PlanError when the run has another number of devices than the plan, or they lack what it asks for."""
    if plan.devices != world.size:
        check_devices(plan, world.size)
    for technique in TECHNIQUES:
        if technique.check and any(getattr(plan, name) != getattr(Plan, name) for name in technique.fields):
            technique.check(plan, world)


def apply(
    model: nn.Module,
    plan: Plan,
    world: World,
    *,
    optimizers: Sequence[Optimizer] = (),
    piggyback_loss: bool = False,
    counts: Callable[[], bool] | None = None,
) -> Applied:
    """Change `model` as `plan` says, in place, on this rank's device. Start values are those of rank 0. Collective.

    optimizers: made of the model's parameters before; they go on with what the plan makes of them (see `bind`).
    piggyback_loss: `backward` will be asked for the mean of a value with most losses, so that it should travel along.
    counts: whether what this rank runs now counts, or is a padding sample. Where it is given, batch norms take the
        statistics of all ranks: forwards in training are then collective.
    """
    if plan.devices != world.size:
        check_devices(plan, world.size)
    setup = Setup(model, plan, world, counts, piggyback_loss, was_compiled=uncompile(model))
    for technique in TECHNIQUES:
        if technique.check_model:
            technique.check_model(setup)
    names = names_of(model)
    setup.fill = take_fakes(model)
    for technique in TECHNIQUES:
        if technique.apply:
            technique.apply(setup)
    applied = Applied(model, plan, setup.reduction, tuple(setup.notes), setup.coupled_gradients)
    for optimizer in optimizers:
        rebind(optimizer, names, dict(model.named_parameters()))
        bind(applied, optimizer, world)
    return applied


def reduction_of(named: Mapping[str, nn.Parameter], plan: Plan, *, piggyback_loss: bool = False) -> Reduction:
    """What averages the gradients of replicated parameters, of one model or of several."""
    dtype = reduced_in(plan.dtypes)
    return DataParallel(list(named.items()), bucket_mb=plan.bucket_mb, piggyback_loss=piggyback_loss, dtype=dtype)


def bind(applied: Applied, optimizer: Optimizer, world: World) -> None:
    """Change an optimizer of the model's parameters as the plan says: needed once for one made after `apply`."""
    for technique in TECHNIQUES:
        if technique.bind:
            technique.bind(optimizer, applied.plan, world)


def scale_gradients(parameters: Iterable[Tensor], factor: Tensor) -> None:
    """Multiply the gradient of every parameter by a scalar, in place."""
    for p in parameters:
        if p.grad is not None:
            p.grad.mul_(factor.to(p.grad.dtype))
