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
    """A model to which a plan is being applied. Each technique of the plan reads and sets fields, and so passes results
    to later techniques.

    samples: returns how many samples of the current batch this rank has. It is 0 if the rank has only a padding sample,
        and None outside of a loop over batches. If given, batch norms use the statistics of all ranks.
    piggyback_loss: whether the mean of a loss should be sent along with the gradients.
    was_compiled: whether the user had compiled the model or a part of it.
    stage_cost: returns the cost of a block, given its name and the block. By default, the cost is the number of
        parameters.
    fill: fills a deferred model with values. The arguments are the device for whole tensors, and the device for this
        rank's shards.
    parts_on_host: whether this rank's shards of divided parameters are in host memory.
    gather_dtypes: the dtypes in which shards are gathered and gradients are reduced.
    gathered_narrow: the ids of the parameters that are gathered in the narrow compute dtype.
    reduction: averages gradients over the ranks. None on one device.
    plain: returns a loss as a plain tensor. It is used if there is no `reduction`.
    coupled_gradients: whether ranks exchange gradients during a backward, as batch norms over all ranks do. The losses
        of all ranks must then have the same scale in the backward.
    let_go: frees this rank's shards of the parameters with the given names, and returns what
        `compat.sharding.Group.let_go` returns. For parameters that only other pipeline stages need. None if parameters
        are not sharded.
    own_parts: the modules whose parameters are divided before `shard` is applied, such as stacked experts. Maps each
        module to the mesh over which `shard` divides its parameters further and reduces their gradients.
    pipeline: the `Pipeline` that runs the stages of this rank, if the plan has a pipeline.
    notes: sentences for the user on what differs from a run on one device.
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
