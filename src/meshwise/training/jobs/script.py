"""Run a user's script in this process, like `python script.py`."""

from __future__ import annotations

import os
import re
import runpy
import sys
from collections.abc import Mapping, Sequence
from inspect import isfunction
from pathlib import Path
from typing import Any

from meshwise import parallel
from meshwise.spec.errors import UsageError
from meshwise.spec.user_code import name_line
from meshwise.training import process
from meshwise.training.job.job import Job
from meshwise.workers.environment import read_world

IMPORT = re.compile(r"^[^#\n]*\b(?:import|from)\b[^#\n]*\bmeshwise\b|import_module\(.meshwise", re.MULTILINE)
VERBS = {"meshwise.launcher.run", "meshwise.checker.check"}
"""Modules whose functions train a job. A script imports such a module only if it uses one of them."""


def is_plain(script: Path) -> bool:
    """Return whether a script does not import meshwise. It may then use DDP or accelerate."""
    return not IMPORT.search(_text(script))


def _text(script: Path) -> str:
    return script.read_text(encoding="utf-8", errors="replace")


def run_script_file(script: Path, arguments: Sequence[str]) -> dict[str, Any]:
    """Run `script` as `__main__` with these arguments, and with its folder first on the module path. Return its global
    variables."""
    if (is_plain(script) or "Trainer" in _text(script)) and read_world(os.environ).device == "cpu":
        os.environ.setdefault("ACCELERATE_USE_CPU", "true")  # otherwise accelerate and Trainer only look for GPUs
    sys.argv = [str(script), *arguments]
    sys.path.insert(0, str(script.resolve().parent))
    try:
        return runpy.run_path(str(script), run_name="__main__")
    except UsageError as error:
        name_line(error)  # add the user's line, as a run shows no traceback
        raise
    except (RuntimeError, AssertionError) as error:
        parallel.shard_refusals.add_advice(error)
        raise


def refuse_untrained_job(script: Path, variables: Mapping[str, Any]) -> None:
    """Raise UsageError if a script has defined a Job, or a function that returns one, but has not trained anything."""
    names = (Job, "Job", "mw.Job", "meshwise.Job")
    makes = {name for name, f in variables.items() if isfunction(f) and f.__annotations__.get("return") in names}
    jobs = [name for name, value in variables.items() if isinstance(value, Job) or name in makes]
    if jobs and not (VERBS & sys.modules.keys() or process.session.has_begun()):
        raise UsageError(
            f"{script.name} defines the job '{jobs[0]}' but trains nothing. Run {script.name}:{jobs[0]} to train it."
        )
