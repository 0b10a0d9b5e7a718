"""Run a user's own script in this process, as `python script.py` would. Tested in tests/equivalence/test_scripts.py."""

from __future__ import annotations

import runpy
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from meshwise.parallel.shard import note_what_was_not_gathered
from meshwise.spec.errors import UsageError


def refuse_job_options(script: str, said: Mapping[str, object]) -> None:
    """Raises UsageError for an option of a job (`batch_size`) that has a value: an own loop does not know it."""
    for name, value in said.items():
        if value is not None:
            option = f"--{name.replace('_', '-')}" + (f" {value}" if value is not True else "")
            raise UsageError(
                f"{option}: {script} keeps its own loop. Write its own options behind its name, or make a Job."
            )


def run_script_file(script: Path, arguments: Sequence[str]) -> None:
    """Run `script` as `__main__` with these arguments, its folder first on the module path."""
    sys.argv = [str(script), *arguments]
    sys.path.insert(0, str(script.resolve().parent))
    try:
        runpy.run_path(str(script), run_name="__main__")
    except (RuntimeError, AssertionError) as error:
        note_what_was_not_gathered(error)
        raise
