"""`meshwise run --folder DIR`: the run that lies in a folder goes on by the command that began it.

So a batch script is the same at every start. Tested in tests/cli/test_submit.py.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from meshwise.api.restarts import refuse_without_progress
from meshwise.records import folder as names
from meshwise.records.code_files import refuse_changed_code
from meshwise.spec.errors import MeshwiseError, UsageError
from meshwise.spec.options import options_of
from meshwise.training.run_options import RunOptions

ASKED = "asked"
"""In run.json: the options as the run was first started with them."""


def continued(options: RunOptions) -> RunOptions:
    """The options; where a run lies in their folder, those that it goes on with: its own, and what is asked otherwise
    than at its beginning. Raises UsageError for the run of another job, and for a program that is not what was sent."""
    assert options.folder is not None
    folder = Path(options.folder)
    if options.resume is not None:
        raise UsageError("--folder goes on with the run that lies there, as --resume does. Give one of them.")
    if not (folder / names.RUN).exists():
        return options
    refuse_stopped(folder)
    facts = names.read_run(folder)
    try:
        refuse_without_progress(folder, facts)
        refuse_changed_code(folder, str(options.job or facts.get("job", "")))
    except MeshwiseError as error:  # whoever looks at the run later sees why it does not go on
        names.change_run(folder, status="failed", error=str(error))
        raise
    asked = facts.get(ASKED)
    if not facts.get("sessions") or not isinstance(asked, dict):
        return options
    if options.job is not None and asked.get("job") not in (None, options.record()["job"]):
        raise UsageError(f"--folder {folder}: the run there is of job '{asked['job']}', not '{options.job}'.")
    now = options.record()
    same = {name for name, _, option in options_of(RunOptions) if option.recorded and now[name] == _listed(asked, name)}
    new = RunOptions()
    given = replace(options, **{name: getattr(new, name) for name in {*same, "job"}})
    return replace(given.resumed(facts), folder=folder)


def refuse_stopped(folder: Path) -> None:
    """Raises UsageError for a run that somebody has stopped for good."""
    if (folder / names.STOP).exists():
        raise UsageError(
            f"{folder}: was stopped by meshwise stop, and is not started again. Send it once more with meshwise submit "
            f"{folder}, or go on here: meshwise run --resume {folder}"
        )


def _listed(asked: dict[str, object], name: str) -> object:
    value = asked.get(name)
    return tuple(value) if isinstance(value, list) else value
