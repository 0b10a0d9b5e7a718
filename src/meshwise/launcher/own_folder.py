"""Continue the run of a folder: `meshwise run --folder DIR`.

The same command begins and continues the run.

So a batch script has the same command at every start. Tested in tests/cli/test_submit.py.
"""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

from meshwise.job.options import RunOptions
from meshwise.launcher.restarts import refuse_without_progress
from meshwise.records import folder as names
from meshwise.records.checkpoints import run_and_checkpoint
from meshwise.records.code_files import refuse_changed_code
from meshwise.records.lock import refuse_held
from meshwise.spec.errors import MeshwiseError, UsageError
from meshwise.spec.options import options_of
from meshwise.workers.launchers.find import place_in

ASKED = "asked"
"""Key in run.json of the options with which the run was first started."""


def continued(options: RunOptions) -> RunOptions:
    """Return the options. If their folder has a run, return that run's options, changed by given options that differ
    from its first start. Raises UsageError for another job's run, or if the program changed since it was submitted."""
    assert options.folder is not None
    folder = Path(options.folder)
    if options.resume is not None:
        raise UsageError("--folder and --resume both continue an earlier run. Give only one of them.")
    facts = run_in(folder, options.job)
    asked = facts.get(ASKED)
    if not facts.get("sessions") or not isinstance(asked, dict):
        return options
    if options.job is not None and asked.get("job") not in (None, options.record()["job"]):
        raise UsageError(f"--folder {folder}: the run there belongs to job '{asked['job']}', not '{options.job}'.")
    now = options.record()
    same = {name for name, _, option in options_of(RunOptions) if option.recorded and now[name] == _listed(asked, name)}
    new = RunOptions()
    given = replace(options, **{name: getattr(new, name) for name in {*same, "job"}})
    return replace(given.resumed(facts), folder=folder)


def refuse_running(options: RunOptions) -> None:
    """Raise UsageError at once if a process of this machine holds the folder of the run to resume. A start by a
    scheduler, or on several machines, may hold the folder already: it is checked later, when the folder is locked.
    """
    given = options.folder if options.resume is None else options.resume
    several = options.nnodes != 1 or options.node_rank or options.rdzv or place_in(os.environ).launcher
    if given is not None and not several:
        refuse_held(run_and_checkpoint(Path(given))[0])


def run_in(folder: Path, program: object) -> dict[str, Any]:
    """Return the record of the run in a folder, which `program` resumes; {} if there is none.

    Raises UsageError for a run that was stopped for good, is of another script, or has files changed since it was
    submitted, and WorkerFailed for a job that makes no progress."""
    if not (folder / names.RUN).exists():
        return {}
    facts = names.read_run(folder)
    word = str(program or facts.get("job", ""))
    script, there = word.endswith(".py"), str(facts.get("job", ""))
    if (script or there.endswith(".py")) and Path(there).name != Path(word).name:
        raise UsageError(f"--folder {folder}: the run there belongs to '{there}', not '{word}'. Name another folder.")
    if (folder / names.STOP).exists():
        raise UsageError(
            f"{folder} was stopped by meshwise stop, so it does not start by itself. Send it again with meshwise "
            f"submit {folder}, or continue it here: meshwise run --resume {folder}"
        )
    try:
        if not script:  # which has its states elsewhere
            refuse_without_progress(folder, facts)
        refuse_changed_code(folder, word)
    except MeshwiseError as error:  # whoever looks at the run later sees why it does not go on
        names.change_run(folder, status="failed", error=str(error))
        raise
    return facts


def _listed(asked: dict[str, object], name: str) -> object:
    value = asked.get(name)
    return tuple(value) if isinstance(value, list) else value
