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
"""The key in run.json under which the options of the run's first start are recorded."""


def continued(options: RunOptions) -> RunOptions:
    """Return the options with which to start or continue the run in the folder `options.folder`.

    If the folder holds no run yet, these are the given options. Otherwise, they are the options that were recorded for
    the run. If the user now gives an option another value than at the first start of the run, the new value replaces
    the recorded value.

    Raises UsageError if `options.resume` is set too, if the run in the folder belongs to another job, or if the program
    has changed since the run was submitted.
    """
    assert options.folder is not None
    folder = Path(options.folder)
    if options.resume is not None:
        raise UsageError("--folder and --resume both continue an earlier run. Use only one of these options.")
    facts = run_in(folder, options.job)
    asked = facts.get(ASKED)
    if not facts.get("sessions") or not isinstance(asked, dict):
        return options
    if options.job is not None and asked.get("job") not in (None, options.record()["job"]):
        raise UsageError(f"--folder {folder} contains a run of job '{asked['job']}', not of '{options.job}'.")
    now = options.record()
    same = {name for name, _, option in options_of(RunOptions) if option.recorded and now[name] == _listed(asked, name)}
    new = RunOptions()
    given = replace(options, **{name: getattr(new, name) for name in {*same, "job"}})
    return replace(given.resumed(facts), folder=folder)


def refuse_running(options: RunOptions) -> None:
    """Raise UsageError if a run is to be continued that is still running on this machine. A running run holds the lock
    of its folder.

    Runs of a scheduler or on several machines are not checked here. Their processes start together, and one of them may
    hold the lock already. Their lock is checked later, when it is taken.
    """
    given = options.folder if options.resume is None else options.resume
    several = options.nnodes != 1 or options.node_rank or options.rdzv or place_in(os.environ).launcher
    if given is not None and not several:
        refuse_held(run_and_checkpoint(Path(given))[0])


def run_in(folder: Path, program: object) -> dict[str, Any]:
    """Return the record of the run in a folder. Return an empty dict if the folder holds no run.

    program: the job or script that is to continue the run.

    Raises an error if the run cannot continue: UsageError if `meshwise stop` has stopped it, if it is a run of another
    script, or if its files have changed since it was submitted. Raises WorkerFailed if its last starts made no
    progress.
    """
    if not (folder / names.RUN).exists():
        return {}
    facts = names.read_run(folder)
    word = str(program or facts.get("job", ""))
    script, there = word.endswith(".py"), str(facts.get("job", ""))
    if (script or there.endswith(".py")) and Path(there).name != Path(word).name:
        raise UsageError(f"--folder {folder} contains a run of '{there}', not of '{word}'. Name another folder.")
    if (folder / names.STOP).exists():
        raise UsageError(
            f"{folder} was stopped by meshwise stop, so it does not restart by itself. Submit it again with meshwise "
            f"submit {folder}, or continue it on this machine: meshwise run --resume {folder}"
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
