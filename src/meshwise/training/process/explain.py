"""Say where an error was raised, and how to save memory.

If a step of a job or script ran out of memory, the proposed plan computes the same numbers with less memory: blocks run
again in the backward, with the same draws, or a script's parameters are sharded, or an accelerator's activations wait
in the host's memory.
"""

from __future__ import annotations

from dataclasses import replace

import torch

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
from meshwise.workers.failure import is_communication_error


def explain(error: BaseException, world: World, steps: int | None, recorder: Recorder, plan: Plan) -> None:
    """Add notes to an error that ends a run. They name the rank, the step and the phase in which the error was raised.
    If memory ran out, another note says how much memory was used, and what to do. Errors that meshwise raises itself
    get no note.

    steps: the number of finished steps; None if training has not begun.
    """
    if isinstance(error, MeshwiseError):
        return
    step = f"step {steps + 1}" if steps is not None else "before the first step"
    add_advice(error)
    error.add_note(f"rank {world.rank}, {step}, phase {recorder.phase}")
    found = None if steps is None else smaller_plan(plan, world)
    full = is_out_of_memory(error)
    if found is not None and (full or is_communication_error(error)):  # a peer's machine may have run out of memory
        error.smaller_plan = (plan_to_toml(found[0]), found[1])  # type: ignore[attr-defined]
    if full:
        advice = f"A plan that needs less: {found[1]}" if found else "Use a smaller --batch-size or more devices"
        error.add_note(_memory_text(world.device, advice))


def explain_in_script(error: BaseException, world: World, plan: Plan) -> None:
    """Add a note to the error of a user's loop that ran out of memory."""
    if not is_out_of_memory(error):
        return
    advice = advised("Use smaller batches and {accumulate}, or more devices", current().program)
    if (found := smaller_plan(plan, world, script=True)) is not None:
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


def smaller_plan(plan: Plan, world: World, *, script: bool = False) -> tuple[Plan, str] | None:
    """Return a plan that needs less memory than `plan`, and a text that says what it changes, or None."""
    if plan.recompute != "full" and (again := _changed(plan, recompute="full")):
        return again, "recompute=full: blocks run again in the backward"
    if script and plan.data > 1 and (parts := _changed(plan, data=1, shard=plan.shard * plan.data)):
        return parts, f"shard={parts.shard}: each rank holds a part of the parameters, gradients and optimizer state"
    if world.kind != "cpu" and "activations" not in plan.offload:
        away = (*plan.offload, "activations")
        if hosted := _changed(plan, offload=away):
            return hosted, f"offload={','.join(away)}: activations wait in the host's memory"
    return None


def _changed(plan: Plan, **fields: object) -> Plan | None:
    try:
        return replace(plan, **fields)  # type: ignore[arg-type]
    except PlanError:
        return None
