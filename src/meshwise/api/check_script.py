"""Check a script that keeps its own loop: on one device and under the plan, in float64, compared."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch

from meshwise.equivalence.proof import Proof, prove
from meshwise.equivalence.script import watch_script
from meshwise.equivalence.script_seen import Seen, check_same_steps, check_seen, with_unsummed
from meshwise.equivalence.trace import CheckSpec
from meshwise.equivalence.under_plan import Draws
from meshwise.jobs.script import run_script_file
from meshwise.machine.find import find_devices
from meshwise.parallel.apply import check_fits
from meshwise.spec.devices import WorkerSlot, parse_devices
from meshwise.spec.errors import UsageError
from meshwise.spec.plan import Plan, plan_to_toml
from meshwise.spec.world import World
from meshwise.training.plan_choice import PLAN_FILE, check_for_scripts
from meshwise.workers.launch import launch

DEFAULT_DEVICES = "2xcpu"


def check_script(
    script: Path,
    arguments: Sequence[str] = (),
    *,
    plan: Plan | None = None,
    devices: str | None = None,
    steps: int = 3,
    seed: int | None = None,
    tell: Callable[[str], None] = lambda text: None,
) -> Proof:
    """Prove that a script computes under a plan what it computes on one device, or name what does not, and why.

    plan: None leaves it to the script, which has replicas on all `devices` if it names none. seed: of torch, random and
    numpy, where the script sets none. What the script writes with `mw.save` goes into a folder of the check.
    Raises UsageError for a script that cannot be checked, WorkerFailed with its traceback when it fails.
    """
    if not script.is_file():
        raise UsageError(f"{script}: no such file. Name a Python file.")
    words = devices or (f"{plan.devices}xcpu" if plan is not None else DEFAULT_DEVICES)
    slots = find_devices(parse_devices(words))
    if plan is not None:
        check_fits(plan, World(size=len(slots), device=slots[0].device))
        check_for_scripts(plan)
    task = (script.resolve(), list(arguments), steps, 2 * len(slots) + 1, seed or 0)
    with tempfile.TemporaryDirectory(prefix="meshwise-check-") as folder:
        tell(f"one device, {steps} steps")
        (one,) = _ran(task, None, slots[:1], plan, Path(folder) / "one")
        check_seen(one, script)
        tell(f"{plan or 'the plan of the script'}, {words}")
        many, *_ = _ran(task, one.draws, slots, plan, Path(folder) / "many")
    check_seen(many, script)
    check_same_steps(one, many, script)
    sides = with_unsummed(one, many)
    assert sides[0] is not None and sides[1] is not None and many.plan is not None
    return prove(script.name, CheckSpec(many.plan, steps), words, sides[0], sides[1])


def _ran(
    task: tuple[Path, list[str], int, int, int],
    draws: Draws | None,
    slots: Sequence[WorkerSlot],
    plan: Plan | None,
    folder: Path,
) -> list[Seen]:
    folder.mkdir()
    file = None if plan is None else folder / "plan.toml"
    if file is not None and plan is not None:
        file.write_text(plan_to_toml(plan), encoding="utf-8")
    results: list[Seen] = launch(_in_worker, (*task, draws, file, folder), slots)
    return results


def _in_worker(
    script: Path,
    arguments: list[str],
    steps: int,
    ragged: int,
    seed: int,
    draws: Draws | None,
    plan: Path | None,
    folder: Path,
) -> Seen | None:
    if plan is not None:
        os.environ[PLAN_FILE] = str(plan)
    torch.set_num_threads(1)  # the same sums in the same order on both sides
    return watch_script(partial(run_script_file, script, arguments), steps, ragged, draws, seed, folder)
