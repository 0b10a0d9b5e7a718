"""Define a technique: check, apply to a model, bind an optimizer.

Each technique has a file.

A new technique needs a field of the plan, a file, and a position in the order of `apply.py`. What an earlier technique
leaves for a later one is in `Setup`: techniques do not import each other.

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
    """A model under a plan: what techniques pass to one another while it is applied, and the result.

    samples: returns how many samples this rank works on; 0 for a padding sample, None outside a loop over batches. If
        given, batch norms take the statistics of all ranks.
    piggyback_loss: whether the mean of a loss should be sent along with the gradients.
    was_compiled: whether the user had compiled the model or a part of it.
    stage_cost: what a block costs, by its name; None: its number of parameters.
    fill: gives a deferred model its values on one device, and this rank's parts on another.
    parts_on_host: whether this rank's parts of divided parameters lie in the host's memory.
    gather_dtypes, gathered_narrow: the dtypes that shards are gathered in, and the ids of those parameters.
    reduction: averages gradients over the ranks; None on one device.
    plain: turns a loss into a plain tensor, if no reduction does so.
    coupled_gradients: whether a rank's gradients depend on other ranks inside the backward (batch norms over all
        ranks), so that each rank's loss must be scaled before the backward, in a unit that all ranks share.
    let_go: drops this rank's shards of parameters, given by name, that other stages of a pipeline hold. Returns them as
        `compat.sharding.Group.let_go` does. None if parameters are not sharded.
    own_parts: modules whose parameters are divided already, and the mesh over which to reduce and shard the parts.
    apart: parameters that are divided already, with gradients that are means over ranks after the backward: the
        module and the name in it, by full name.
    pipeline: the `Pipeline` that runs the stages of this rank, if the plan has one.
    notes: sentences, for the user to read, on what differs from one device.
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
    """The functions of a technique, which do nothing under a plan that does not use it; None if not needed.

    check_model: raises PlanError, before the model is touched, for what the model cannot have.
    apply: changes the model in place. Collective.
    bind: changes an optimizer of the model's parameters in place.
    """

    check_model: Callable[[Setup], None] | None = None
    apply: Callable[[Setup], None] | None = None
    bind: Callable[[Optimizer, Plan, World], None] | None = None
