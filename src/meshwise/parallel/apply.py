"""Apply a plan to an ordinary model. The techniques, in their order and with its reason:

    precision    first: later techniques must see the parameters in the dtype that they are stored in
    data         last: it reduces the gradients of whatever the others have made

Sharding, tensor and pipeline parallelism, recomputation and offload will take their places in between.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor, nn

from meshwise.parallel.data import DataParallel
from meshwise.parallel.precision import store_parameters
from meshwise.spec.errors import PlanError
from meshwise.spec.plan import Plan, changed, check_devices
from meshwise.spec.world import World
from meshwise.transfer import collectives

BUILT = {"data", "accumulate", "precision", "bucket_mb"}
"""The fields of a plan that do something today; a plan with another one is refused."""


@dataclass(frozen=True)
class Applied:
    """A model under a plan: the same object, and how a backward is run on it.

    reduction: averages gradients over the ranks; None on one device.
    notes: what differs from one device, for the user to read.
    """

    model: nn.Module
    plan: Plan
    reduction: DataParallel | None
    notes: tuple[str, ...] = ()

    def backward(
        self,
        loss: Tensor,
        *,
        reduce: bool = True,
        factor: Callable[[], Tensor] | None = None,
        whole: bool = False,
        value: Tensor | None = None,
    ) -> Tensor | None:
        """Add the gradient of `loss` to `.grad`, as the mean over ranks when `reduce` is set.

        factor: gives a scalar that multiplies what this backward adds; with `whole`, all that `.grad` then holds.
        value: a detached scalar whose mean over ranks is returned.
        """
        if self.reduction is not None:
            return self.reduction.backward(loss, reduce=reduce, factor=factor, whole=whole, value=value)
        loss.backward()
        if factor is not None:
            scale_gradients(self.model, factor())
        return value


def apply(model: nn.Module, plan: Plan, world: World, *, metered: bool = False) -> Applied:
    """Lay `model` on this rank's device as `plan` says, in place. Start values are those of rank 0. Collective.

    metered: `backward` will be asked for the mean of a value with most losses, so that it should travel along.
    """
    check_fits(plan, world)
    store_parameters(model, plan.precision)
    model.to(world.device)
    collectives.broadcast_tensors([*model.parameters(), *model.buffers()])
    reduction = None
    if world.size > 1:
        named = list(model.named_parameters())
        reduction = DataParallel(named, bucket_mb=plan.bucket_mb, metered=metered)
    return Applied(model, plan, reduction, differences(model) if world.size > 1 else ())


def differences(model: nn.Module) -> tuple[str, ...]:
    """What a model on several ranks does not do as on one device, a sentence each."""
    kinds = " ".join({type(module).__name__ for module in model.modules()})
    notes = []
    if "BatchNorm" in kinds:
        notes.append("batch norm: each rank takes the statistics of its own share, so numbers are not one device's.")
    if "Dropout" in kinds:
        notes.append("dropout: each rank draws its own masks, keyed by (seed, step, rank).")
    return tuple(notes)


def check_fits(plan: Plan, world: World) -> None:
    """Raises PlanError when the plan needs another number of devices than the run has, or what is not built yet."""
    check_devices(plan, world.size)
    for name, value in changed(plan).items():
        if name not in BUILT:
            raise PlanError(f"{name}={value!r} is not built yet. Leave {name} out.")


def scale_gradients(model: nn.Module, factor: Tensor) -> None:
    """Multiply every gradient of `model` by a scalar, in place."""
    for p in model.parameters():
        if p.grad is not None:
            p.grad.mul_(factor.to(p.grad.dtype))
