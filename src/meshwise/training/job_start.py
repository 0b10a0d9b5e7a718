"""What a job's run begins with: its engine, and its state before the first step.

Tested in tests/training/test_plans_in_a_loop.py.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from meshwise.compat.loss_scale import Scaler
from meshwise.parallel.deferred import constructed
from meshwise.parallel.mesh import divide_work
from meshwise.parallel.step_hooks import needs_closure
from meshwise.recovery.state import RunState
from meshwise.spec.errors import UsageError
from meshwise.spec.plan import Plan
from meshwise.training.engine import Engine
from meshwise.training.guards import attach
from meshwise.training.job import Job
from meshwise.training.keyed import ExactDraws
from meshwise.workers.join import RankContext

NARROW_WEIGHTS = "safetensors has no complex128: weights.safetensors has complex64 of it. Saved states have it whole."


def make_engine(
    session: RankContext, plan: Plan, notify: Callable[[str], None] = lambda text: None, *, exact_random: bool = False
) -> Engine:
    """An engine for a job under `plan`. notify: takes the notes on its plan."""
    draws = ExactDraws() if exact_random else None
    return attach(Engine(divide_work(plan, session.world), session.gate, notify, draws=draws))


def begun(job: Job, plan: Plan, engine: Engine) -> RunState:
    """The state of a run before its first step: the model of `job` under `plan`, its optimizer. Collective."""
    torch.manual_seed(job.seed)
    model, note = constructed(job.model) if plan.parameters_divided or plan.pipeline > 1 else (job.model(), "")
    if plan.devices == 1:  # what several devices have is placed by the plan
        model.to(engine.world.device)
    engine.program.stage_cost = job.stage_cost
    engine.add_models([model], plan)
    if note:
        engine.notify(note)
    optimizer = job.optimizer(model.parameters())
    if plan.dtypes.scaled and needs_closure(optimizer):
        raise UsageError(
            f"job '{job.name}': {type(optimizer).__name__} runs the loss several times a step, and precision="
            f"{plan.precision!r} scales a loss once a step. Use precision='bf16' or 'fp32', or another optimizer."
        )
    engine.add_optimizer(optimizer)
    if any(tensor.dtype == torch.complex128 for tensor in model.state_dict().values() if isinstance(tensor, Tensor)):
        engine.notify(NARROW_WEIGHTS)
    scheduler = job.scheduler(optimizer) if job.scheduler else None
    return RunState(model, optimizer, scheduler, loss_scaler(engine.world.device, plan), job.seed)


def loss_scaler(device: str, plan: Plan) -> torch.amp.GradScaler:
    """Scales the loss where float16 is computed in; passes everything through otherwise."""
    return Scaler(device.split(":")[0], enabled=plan.dtypes.scaled)
