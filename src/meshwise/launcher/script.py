"""Run a user's script on every device.

The launcher of a script imports no torch, so its workers start at once.
"""

from __future__ import annotations

import json
import os
import shlex
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from rich.console import Console

from meshwise import launcher
from meshwise.launcher.placing import placed
from meshwise.launcher.start import start, supervised
from meshwise.launcher.supervise import LaunchedProgram
from meshwise.parallel.fits import check_fits, check_for_scripts
from meshwise.records import folder as names
from meshwise.records.checked import unchecked
from meshwise.reports.analyse import report_of
from meshwise.reports.read import read_timeline
from meshwise.spec.errors import UsageError
from meshwise.spec.options import check_script
from meshwise.spec.world import World
from meshwise.training import engine, process, recording, tracking
from meshwise.training.job.options import RunOptions
from meshwise.training.jobs.script import refuse_untrained_job, run_script_file
from meshwise.workers.environment import EXACT_RANDOM, LOG, PLAN_FILE, SAVES, STATES, read_world


def start_script(
    arguments: Sequence[str],
    options: RunOptions,
    console: Console,
    began: float,
    starts: Callable[[RunOptions], object],
) -> int:
    """Run a script on all devices, with one process for each device. Return the exit code."""
    script = Path(str(options.job))
    if options.resume is not None:
        raise UsageError(
            f"--resume {options.resume}: {script.name} is a script, and a script loads its saved state itself "
            f"(mw.load). Leave --resume out, and pass the file to load in an option of the script, after {script.name}."
        )
    check_script(str(script), options)
    options, joined = placed(options)
    if options.folder is not None:
        launcher.placing.run_in(Path(options.folder), script)
    program = partial(_script_program, script, arguments, options)
    if joined:
        if options.gives_plan:
            raise UsageError(
                f"--plan and --set have no effect under torchrun, srun or mpirun. Set {PLAN_FILE}=plan.toml in the "
                "environment of the script instead."
            )
        with launcher.joined.joined_run(program, options, began, process.session.saves) as run:
            call = partial(_script_in_worker, script, arguments, options)
            run.restarts.attempted(call)()
        if read_world(os.environ).rank == 0:
            print("\n".join(_where(run.folder)), file=sys.stderr, flush=True)
        return 0
    starts(options)
    started = start(program, options, began)
    if started.world > 1 and started.first_rank == 0 and started.restarts.number == 1:
        print(unchecked(started.folder.parent, script, arguments), end="", file=sys.stderr, flush=True)
    _, code = supervised(started, console, options.seconds_left(began))
    report = report_of(read_timeline(started.folder), str(started.folder))
    lines = [report.verdict] if report.steps else []
    text = "\n".join([*lines, *_where(started.folder)])
    Console(stderr=True).print(text, soft_wrap=not sys.stderr.isatty(), markup=False, highlight=False)
    return code


def _where(folder: Path) -> list[str]:
    return [f"records     {folder}", f"more with   meshwise report {shlex.quote(str(folder))}"]


def _script_program(script: Path, arguments: Sequence[str], options: RunOptions, world: World) -> LaunchedProgram:
    plan = options.plan_on(world.size) if options.gives_plan else None
    if plan is not None:
        check_fits(plan, world)
        check_for_scripts(plan)
    call = partial(_script_in_worker, script.resolve(), list(arguments), options)
    text = script.read_text(encoding="utf-8", errors="replace")
    # Scripts without meshwise, and scripts of Trainer or TRL, choose their device themselves, from LOCAL_RANK.
    picks = "meshwise" not in text or "TrainingArguments" in text or "trl" in text
    return LaunchedProgram(str(script), plan, call, {"arguments": list(arguments)}, sees_all=picks)


def _script_in_worker(script: Path, arguments: Sequence[str], options: RunOptions, folder: Path) -> None:
    if options.gives_plan:
        os.environ[PLAN_FILE] = str((folder / names.PLAN).resolve())
    if options.log:
        os.environ[LOG] = ",".join(options.log)
    if options.folder is not None:
        os.environ[STATES] = str(folder.resolve())
    saves = {"every": options.save_every, "keep": options.keep}
    if any(saves.values()):
        os.environ[SAVES] = json.dumps({name: value for name, value in saves.items() if value is not None})
    if options.exact_random:
        os.environ[EXACT_RANDOM] = "1"
    world = read_world(os.environ)
    seeded = engine.seeds.seed_alike(folder.name) if world.size > 1 else None
    recording.plain_program.begin(process.session.tell, seeded)
    process.same_work.refuse_same_work(script.name, world)
    try:
        variables = run_script_file(script, arguments)
    finally:
        process.session.program_ends()
    recording.plain_program.tell_what_is_missing(script.name)
    refuse_untrained_job(script, variables)
    applied = process.session.process_engine() if options.gives_plan else None
    if applied is not None and not applied.has_applied:
        applied.notify(
            f"{script.name} never passed a model to mw.distribute, so the plan changed nothing: every worker ran alone."
        )
    if options.log and not tracking.tracking.has_logged():
        process.session.tell(f"{script.name} never called mw.log, so {', '.join(options.log)} got no values.")
