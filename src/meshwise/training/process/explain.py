"""Add context to an error: its place, a plan with less memory.

That plan computes the same numbers, for a job or script whose step ran out of memory. First, microbatches are halved,
if the step is known to be a mean over samples: it is already divided over ranks or microbatches, no batch norm sees a
microbatch, and the model draws no random numbers, which depend on the microbatch. Else blocks run again in the
backward, with the same draws; then, on an accelerator, activations wait on the host.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import nn

from meshwise.hardware.memory import memory_facts
from meshwise.parallel.shard_refusals import add_advice
from meshwise.reports.advice import advised
from meshwise.reports.recorder import Recorder, current
from meshwise.spec.errors import MeshwiseError, PlanError
from meshwise.spec.plan import Plan
from meshwise.spec.plan_file import plan_to_toml
from meshwise.spec.plan_settings import setting_texts
from meshwise.spec.units import bytes_text
from meshwise.spec.world import World
from meshwise.training.guards.replicas import BATCH_NORMS
from meshwise.workers.failure import is_communication_error

_DRAWS = re.compile(r"drop|rand|bernoulli|multinomial|normal_|uniform_|noise|sample", re.IGNORECASE)


def explain(
    error: BaseException,
    world: World,
    steps: int | None,
    recorder: Recorder,
    smaller: Callable[[], tuple[Plan, str] | None] = lambda: None,
) -> None:
    """Add notes to an error that ends a run. They name the rank, the step and the phase in which the error was raised.
    If memory ran out, another note says how much memory was used, and what to do. Errors that meshwise raises itself
    get no note.

    steps: the number of finished steps; None if training has not begun.
    smaller: a function that returns a plan that needs less memory and a text that says what this plan changes, or None
        if there is no such plan.
    """
    if isinstance(error, MeshwiseError):
        return
    step = f"step {steps + 1}" if steps is not None else "before the first step"
    add_advice(error)
    error.add_note(f"rank {world.rank}, {step}, phase {recorder.phase}")
    full = is_out_of_memory(error)
    if full or is_communication_error(error):  # of use where a peer was killed for the memory of its machine
        found = smaller()
        if found is not None:
            error.smaller_plan = (plan_to_toml(found[0]), found[1])  # type: ignore[attr-defined]
    if full:
        advice = f"A plan that needs less: {found[1]}" if found else "Use a smaller --batch-size or more devices"
        error.add_note(_memory_text(world.device, advice))


def explain_in_script(error: BaseException, world: World, plan: Plan, models: Sequence[nn.Module]) -> None:
    """Add a note to the error of a user's loop that ran out of memory."""
    if not is_out_of_memory(error) or not models:
        return
    found = smaller_plan(plan, nn.ModuleList(models), None, world)
    advice = advised("Use smaller batches and {accumulate}, or more devices", current().program)
    if found is not None:
        settings = " ".join(f"--set {setting}" for setting in setting_texts(found[0]))
        advice = f"A plan that needs less, with the same numbers: {found[1]}. Write meshwise run {settings}"
    error.add_note(_memory_text(world.device, advice))


def _memory_text(device: str, advice: str) -> str:
    facts = ", ".join(f"{name} {bytes_text(value)}" for name, value in memory_facts(device).items())
    return f"out of memory on {device}: {facts}. {advice}."


def is_out_of_memory(error: BaseException) -> bool:
    """Check whether `error` says that a device or this host ran out of memory."""
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    return isinstance(error, RuntimeError) and "can't allocate memory" in str(error)


def smaller_plan(
    plan: Plan, model: nn.Module, batch_size: int | None, world: World, *, apart: bool = False
) -> tuple[Plan, str] | None:
    """Return a plan that needs less memory than `plan`, and a text that says what it changes."""
    rows = 0 if batch_size is None else batch_size // (world.size * plan.accumulate)
    divided = world.size > 1 or plan.accumulate > 1
    normed = any(isinstance(module, BATCH_NORMS) for module in model.modules())
    if apart and rows >= 2 and divided and not normed and not may_draw(model):
        several = 2 * plan.accumulate
        if fewer := _changed(plan, accumulate=several):
            return fewer, f"accumulate={several}: microbatches of half the size"
    if plan.recompute != "full" and (again := _changed(plan, recompute="full")):
        return again, "recompute=full: blocks run again in the backward"
    if batch_size is None and plan.data > 1 and (parts := _changed(plan, data=1, shard=plan.shard * plan.data)):
        return parts, f"shard={parts.shard}: each rank holds a part of the parameters, gradients and optimizer state"
    if world.kind != "cpu" and "activations" not in plan.offload:
        away = (*plan.offload, "activations")
        if hosted := _changed(plan, offload=away):
            return hosted, f"offload={','.join(away)}: activations wait in the host's memory"
    return None


def may_draw(model: nn.Module) -> bool:
    """Check whether a forward pass may draw random numbers, judged by the settings and the source code of the
    modules."""
    for module in model.modules():
        shares = (getattr(module, "p", 0), getattr(module, "dropout", 0))
        if any(isinstance(share, int | float) and share > 0 for share in shares):
            return True
        if not type(module).__module__.startswith("torch.nn."):
            try:
                source = inspect.getsource(type(module))
            except (OSError, TypeError):  # made in an interpreter, or not in Python
                return True
            if _DRAWS.search(source):
                return True
    return False


def _changed(plan: Plan, **fields: object) -> Plan | None:
    try:
        return replace(plan, **fields)  # type: ignore[arg-type]
    except PlanError:
        return None
