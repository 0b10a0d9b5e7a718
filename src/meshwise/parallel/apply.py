"""Apply a plan's techniques to an ordinary model, in order.

The techniques, each with the reason for its place:

    precision    first: later techniques must see the parameters in the dtype that they are stored in
    placement    on the device, with the start values of rank 0; those of a deferred model come later
    stages       what a rank of a pipeline holds: what others hold needs nothing of what follows
    batch norm   over all ranks: a layer's own forward, which recompute and shard then take as it is; so are
    balance losses, of mixtures of experts
    expert       each module of experts' forward finds this rank's experts, and the tokens of all ranks that go to them
    tensor       each module's forward, as its author wrote it, finds this rank's parts of its parameters
    context      the whole model's forward finds this rank's positions of what it is given
    compile      a block's own forward, as its author wrote it: what others put around it is not compiled
    recompute    inside a block: what is sharded gathers a block's parameters once for its second run and its backward
    offload      around the whole model's forward, and inside what shard does before and after that
    shard        after it: a block is gathered around its forward, whatever that forward has become
    start values of a deferred model (deferred.py): once each rank has its part, and before data, which needs them
    pipeline     around a block, whatever its forward has become: it is left, or passed by, as a whole
    data         last: it reduces the gradients of whatever the others have made; with shard, shard does it for both
    zero1        and offload of the optimizer: they need parameters that do not change any more

A technique is a field of the plan, a file of its own (`technique.py` says what is in it), and its place in
`TECHNIQUES`.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import nn
from torch.optim import Optimizer

from meshwise.compat.compiling import uncompile
from meshwise.parallel.balance import BALANCE
from meshwise.parallel.batch_norm import BATCH_NORM
from meshwise.parallel.compiled import COMPILE
from meshwise.parallel.context import CONTEXT
from meshwise.parallel.data import DATA
from meshwise.parallel.deferred import PLACEMENT, START_VALUES, take_fakes
from meshwise.parallel.expert import EXPERT
from meshwise.parallel.offload import OFFLOAD
from meshwise.parallel.offload_state import OFFLOAD_STATE
from meshwise.parallel.pipeline import PIPELINE, STAGES
from meshwise.parallel.precision import PRECISION
from meshwise.parallel.recompute import RECOMPUTE
from meshwise.parallel.shard import SHARD
from meshwise.parallel.technique import Setup
from meshwise.parallel.tensor import TENSOR
from meshwise.parallel.zero1 import ZERO1
from meshwise.spec.plan import Plan
from meshwise.spec.plan_devices import check_devices
from meshwise.spec.world import World

TECHNIQUES = (
    PRECISION,
    PLACEMENT,
    STAGES,
    BATCH_NORM,
    BALANCE,
    EXPERT,
    TENSOR,
    CONTEXT,
    COMPILE,
    RECOMPUTE,
    OFFLOAD,
    SHARD,
    START_VALUES,
    PIPELINE,
    DATA,
    ZERO1,
    OFFLOAD_STATE,
)


def apply(
    model: nn.Module,
    plan: Plan,
    world: World,
    *,
    piggyback_loss: bool = False,
    samples: Callable[[], int | None] | None = None,
    stage_cost: Callable[[str, nn.Module], float] | None = None,
) -> Setup:
    """Change `model` in place as `plan` says, on this rank's device, with the start values of rank 0. Collective.

    Afterwards call `bind` on an optimizer of the model's parameters; re-bind an earlier one first (`rebind.py`).

    piggyback_loss: most calls of `backward` will ask for the mean of a value, so it should be sent with the gradients.
    samples: how many samples this rank works on now (0: a padding sample; None: not in a loop over batches). Where it
        is given, batch norms take the statistics of all ranks: forwards in training are then collective.
    stage_cost: what a block costs, by its name; see `Job`.
    """
    if plan.devices != world.size * plan.within_samples:
        check_devices(plan, world.size * plan.within_samples)
    setup = Setup(model, plan, world, samples, piggyback_loss, was_compiled=uncompile(model), stage_cost=stage_cost)
    for technique in TECHNIQUES:
        if technique.check_model:
            technique.check_model(setup)
    setup.fill = take_fakes(model)
    for technique in TECHNIQUES:
        if technique.apply:
            technique.apply(setup)
    return setup


def bind(optimizer: Optimizer, plan: Plan, world: World) -> None:
    """Change an optimizer as the plan requires that was applied to the optimizer's model."""
    for technique in TECHNIQUES:
        if technique.bind:
            technique.bind(optimizer, plan, world)
