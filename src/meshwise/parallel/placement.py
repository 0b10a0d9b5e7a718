"""Put a model on this rank's device, with rank 0's start values.

A deferred model gets its values (deferred.py) once each rank has its part.
"""

from __future__ import annotations

from meshwise.parallel.technique import Setup, Technique
from meshwise.spec.errors import PlanError
from meshwise.spec.words import some
from meshwise.torch_compat.dispatch import is_fake
from meshwise.torch_compat.modules import hooked_parameters
from meshwise.transfer import collectives


def _check_model(setup: Setup) -> None:
    plan, hooked = setup.plan, hooked_parameters(setup.model)
    made_anew = plan.parameters_divided or plan.expert * plan.pipeline > 1
    if hooked and (made_anew or any(map(is_fake, setup.model.parameters()))):
        raise PlanError(
            f"{some(hooked)}: the program registered a hook on the gradient of this parameter. The plan replaces the "
            "parameter, so the hook would not run. Register the hook in the forward (weight = "
            "self.weight.view_as(self.weight); weight.register_hook(...)), or use a plan with data only."
        )


def _place(setup: Setup) -> None:
    if setup.fill is None:
        setup.model.to(setup.world.device)
        tensors = [*setup.model.parameters(), *setup.model.buffers()]
        collectives.broadcast_tensors(tensors, collectives.everyone())


def _fill(setup: Setup) -> None:
    if setup.fill is not None:
        setup.fill(setup.world.device, "cpu" if setup.parts_on_host else setup.world.device)


PLACEMENT, START_VALUES = Technique(check_model=_check_model, apply=_place), Technique(apply=_fill)
