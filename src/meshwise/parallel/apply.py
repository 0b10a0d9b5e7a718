"""Apply a plan's techniques to an ordinary model, in order.

The techniques, each with the reason for its place:

    precision    first: later techniques must see the parameters in the dtype that they are stored in
    placement    moves the model to the device, with the start values of rank 0; a deferred model gets values later
    stages       drops what other stages of a pipeline hold, so that later techniques need not handle it
    batch norm   over all ranks: changes a layer's own forward, which recompute and shard then wrap
    balance      losses of mixtures of experts, over all ranks: in this place for the same reason
    expert       in each experts module, the forward finds this rank's experts, and the tokens routed to them
    tensor       in each module, the forward, as its author wrote it, finds this rank's parts of its parameters
    context      the whole model's forward finds this rank's positions of its inputs
    compile      compiles a block's own forward, as its author wrote it; wrappers around the forward are not compiled
    recompute    inside a sharded block: shard then gathers the parameters once for the second run and the backward
    offload      around the whole model's forward, and inside what shard does before and after that
    shard        after recompute and offload: it gathers a block around the block's wrapped forward
    start values fills a deferred model (deferred.py) once each rank has its part, before data, which needs the values
    pipeline     around the wrapped forward of a block, which is run or skipped as a whole
    data         last: it reduces the gradients of the parameters that the other techniques have made; under shard,
                 shard does this for both
    zero1        with offload of the optimizer: both need parameters that are no longer replaced

Most techniques have a field in the plan and a file (`technique.py` describes its functions). A technique's line in
`TECHNIQUES` says how to load it when a plan uses it.
"""

from __future__ import annotations

from importlib import import_module
from itertools import chain

from torch import nn
from torch.optim import Optimizer

from meshwise import parallel
from meshwise.parallel.technique import Cost, Samples, Setup, Technique
from meshwise.spec.plan import Plan, changed
from meshwise.spec.plan_devices import check_devices
from meshwise.spec.world import World
from meshwise.torch_compat.compiling import uncompile
from meshwise.torch_compat.dispatch import is_fake

TECHNIQUES: tuple[tuple[str, str], ...] = (
    ("precision.PRECISION", "precision param_dtype compute_dtype grad_dtype"),
    ("placement.PLACEMENT", ""),
    ("pipeline.STAGES", "pipeline"),
    ("batch_norm.BATCH_NORM", ""),
    ("balance.BALANCE", ""),
    ("expert.EXPERT", "expert"),
    ("tensor.TENSOR", "tensor"),
    ("context.CONTEXT", "context"),
    ("compiled.COMPILE", "compile"),
    ("recompute.RECOMPUTE", "recompute"),
    ("offload.OFFLOAD", "offload"),
    ("shard.SHARD", "shard expert tensor"),
    ("placement.START_VALUES", ""),
    ("pipeline.PIPELINE", "pipeline"),
    ("data.DATA", ""),
    ("zero1.ZERO1", "zero1"),
    ("offload_state.OFFLOAD_STATE", "offload"),
)
"""The techniques in their order: where each one is, and the fields of a plan that use it if they differ from their
defaults. A technique without a field depends on the model."""


def techniques_of(plan: Plan, *, compiled: bool = False) -> list[Technique]:
    """Return the techniques that a plan may use, in their order.

    compiled: whether the user had compiled the model.
    """
    used = changed(plan).keys() | ({"compile"} if compiled else set())
    wanted = [place.split(".") for place, names in TECHNIQUES if not names or used & set(names.split())]
    return [getattr(import_module(f"{parallel.__name__}.{file}"), name) for file, name in wanted]


def apply(
    model: nn.Module,
    plan: Plan,
    world: World,
    *,
    piggyback_loss: bool = False,
    samples: Samples | None = None,
    stage_cost: Cost | None = None,
) -> Setup:
    """Change `model` in place as `plan` requires, on this rank's device and with the start values of rank 0.
    Collective.

    After this call, call `bind` on each optimizer of the model's parameters. An optimizer that was made before this
    call still holds the old parameters. For such an optimizer, call `rebind` (`rebind.py`), and then `bind`.

    piggyback_loss: True if most calls of `backward` will pass a `value`. The value is then averaged over the ranks
        together with the gradients, without a collective of its own.
    samples: returns how many samples this rank works on now: 0 for a padding sample, None outside of a loop over
        batches. If `samples` is given, batch norms use the statistics of all ranks, and forwards in training are
        collective.
    stage_cost: returns the cost of a block, given its name and the block; see `Job`.
    """
    check_devices(plan, world.size * plan.within_samples)
    setup = Setup(model, plan, world, samples, piggyback_loss, was_compiled=uncompile(model), stage_cost=stage_cost)
    techniques = techniques_of(plan, compiled=setup.was_compiled)
    for technique in techniques:
        if technique.check_model:
            technique.check_model(setup)
    if any(map(is_fake, chain(model.parameters(), model.buffers()))):
        setup.fill = parallel.deferred.take_fakes(model)
    for technique in techniques:
        if technique.apply:
            technique.apply(setup)
    return setup


def bind(optimizer: Optimizer, plan: Plan, world: World) -> None:
    """Change an optimizer as the plan requires. The plan must have been applied to the optimizer's model."""
    for technique in techniques_of(plan):
        if technique.bind:
            technique.bind(optimizer, plan, world)
