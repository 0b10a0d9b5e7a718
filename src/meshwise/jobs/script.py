"""Run a user's own script in this process, as `python script.py` would. Tested in tests/equivalence/test_scripts.py."""

from __future__ import annotations

import runpy
import sys
from collections.abc import Sequence
from pathlib import Path

from meshwise.parallel.shard import note_what_was_not_gathered


def run_script_file(script: Path, arguments: Sequence[str]) -> None:
    """Run `script` as `__main__` with these arguments, its folder first on the module path."""
    sys.argv = [str(script), *arguments]
    sys.path.insert(0, str(script.resolve().parent))
    try:
        runpy.run_path(str(script), run_name="__main__")
    except (RuntimeError, AssertionError) as error:
        note_what_was_not_gathered(error)
        raise
