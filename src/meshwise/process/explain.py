"""Add context to an error in a run.

Tested in tests/faults/test_faults.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import nn

from meshwise.machine.memory import memory_facts
from meshwise.parallel.shard_refusals import note_what_was_not_gathered
from meshwise.process.smaller import smaller_plan
from meshwise.spec.errors import MeshwiseError
from meshwise.spec.plan import Plan
from meshwise.spec.plan_file import plan_to_toml
from meshwise.spec.plan_settings import setting_texts
from meshwise.spec.units import bytes_text
from meshwise.spec.world import World
from meshwise.timeline.advice import advised
from meshwise.timeline.recorder import Recorder, current
from meshwise.workers.failure import is_communication_error


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
    note_what_was_not_gathered(error)
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
