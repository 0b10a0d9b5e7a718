"""Define a technique: check, apply to a model, bind an optimizer.

Each technique has its own file.

A new technique needs a field of the plan, a file, and a position in the order of `apply.py`. An earlier technique
passes results to a later one in `Setup`: techniques do not import each other.

Tested in tests/parallel/test_apply.py.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.optim import Optimizer

from meshwise.parallel.reduction import Reduction
from meshwise.spec.plan import Plan
from meshwise.spec.world import World


@dataclass
class Setup:
    """A model to which a plan is applied: the inputs, the facts that techniques pass to one another, and the result.

    samples: returns how many samples this rank works on: 0 for a padding sample, None outside a loop over batches. If
        given, batch norms use the statistics of all ranks.
    piggyback_loss: whether the mean of a loss should be sent along with the gradients.
    was_compiled: whether the user had compiled the model or a part of it.
    stage_cost: returns the cost of a block, given its name and the block. None: the number of its parameters.
    fill: fills a deferred model with values. It takes the device for whole tensors and the device for parts of divided
        parameters.
    parts_on_host: whether this rank's parts of divided parameters are in host memory.
    gather_dtypes: the dtypes in which shards are gathered and gradients reduced.
    gathered_narrow: the ids of the parameters that are gathered in the narrow compute dtype.
    reduction: averages gradients over the ranks; None on one device.
    plain: turns a loss into a plain tensor, if no reduction does so.
    coupled_gradients: whether a rank's gradients depend on other ranks inside the backward, as with batch norms over
        all ranks. Then each rank's loss must be scaled before the backward, in a unit that all ranks share.
    let_go: takes the names of parameters that other stages of a pipeline hold, and frees this rank's shards of them.
        Returns what `compat.sharding.Group.let_go` returns. None if parameters are not sharded.
    own_parts: modules with parameters that are already divided, and the mesh over which to reduce and shard these
        parts.
    apart: parameters that are already divided, with gradients that are means over ranks after each backward. Maps the
        full name of such a parameter to its module and its name in the module.
    pipeline: the `Pipeline` that runs the stages of this rank, if the plan has one.
    notes: sentences for the user on what differs from one device.
    """

    model: nn.Module
    plan: Plan
    world: World
    samples: Callable[[], int | None] | None = None
    piggyback_loss: bool = False
    was_compiled: bool = False
    stage_cost: Callable[[str, nn.Module], float] | None = None
    fill: Callable[[torch.device | str, torch.device | str], None] | None = None
    parts_on_host: bool = False
    gather_dtypes: MixedPrecisionPolicy | None = None
    gathered_narrow: Collection[int] = ()
    reduction: Reduction | None = None
    plain: Callable[[Tensor], Tensor] | None = None
    coupled_gradients: bool = False
    let_go: Callable[[set[str]], list[Any]] | None = None
    own_parts: dict[nn.Module, DeviceMesh] = field(default_factory=dict)
    apart: dict[str, tuple[nn.Module, str]] = field(default_factory=dict)
    pipeline: Any = None
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Technique:
    """The functions of a technique. They do nothing under a plan that does not use the technique. A function that is
    not needed is None.

    check_model: raises PlanError, before the model is changed, if the model cannot be used with the technique.
    apply: changes the model in place. Collective.
    bind: changes an optimizer of the model's parameters in place.
    """

    check_model: Callable[[Setup], None] | None = None
    apply: Callable[[Setup], None] | None = None
    bind: Callable[[Optimizer, Plan, World], None] | None = None
