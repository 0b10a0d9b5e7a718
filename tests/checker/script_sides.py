"""Both sides of a check of a script: one device in this process, the plan on the workers of a pool."""

from __future__ import annotations

import contextlib
import itertools
import os
import sys
from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from meshwise.checker.programs import watch_script
from meshwise.checker.proof import Proof, prove
from meshwise.checker.trace import CheckSpec, ProgramTrace, trace_to_compare
from meshwise.spec.plan import Plan
from meshwise.spec.plan_file import plan_to_toml
from meshwise.training.jobs.script import run_script_file
from meshwise.training.process.plan_choice import PLAN_FILE
from meshwise.training.process.session import end_sessions, process_engine
from meshwise.workers.scratch_files import scratch_files

STEPS = 3


@pytest.fixture(autouse=True)
def as_it_was(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """A script runs in this process: its arguments, its folder on the path and what it distributed are forgotten."""
    monkeypatch.setattr(sys, "argv", sys.argv)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.chdir(tmp_path)
    end_sessions()
    yield
    end_sessions()


class _Files(Counter[str]):
    """How often each file was saved: the store of a pool keeps what was counted in earlier programs."""

    def __init__(self, first: int) -> None:
        super().__init__()
        self._first = first

    def __missing__(self, name: str) -> int:
        return self._first


def watched(
    script: str, arguments: list[str], spec: CheckSpec, draws: Any, folder: str, plan: str | None, first: int = 0
) -> Any:
    """first: where the count of saved files begins."""
    if plan is not None:
        own = Path(folder) / f"plan{os.getpid()}.toml"  # another rank's write would empty it for a moment
        own.write_text(plan)
        os.environ[PLAN_FILE] = str(own)
    try:
        with contextlib.chdir(Path(script).parent), scratch_files(Path(folder) / "files"):
            process_engine().given.saves = _Files(first)
            try:
                return watch_script(partial(run_script_file, Path(script), arguments), spec, draws, 0)
            finally:
                end_sessions()  # what it has redirected since is redirected no more
    finally:
        os.environ.pop(PLAN_FILE, None)


_firsts = itertools.count(0, 1000)
ALONE = CheckSpec(Plan(data=2), STEPS)


def sides(
    text: str,
    pool: Any,
    plan: Plan | None = None,
    *arguments: str,
    size: int = 2,
    in_float64: bool = True,
    perturb: bool = False,
) -> tuple[ProgramTrace, ProgramTrace]:
    """What the script does on one device, here, and on the workers of a pool."""
    script = Path("train.py").resolve()
    script.write_text(text)
    said = None if plan is None else plan_to_toml(plan)
    for name in ("one", "many"):
        Path(name).mkdir(exist_ok=True)
    case = (str(script), list(arguments), CheckSpec(plan or Plan(data=size), STEPS, in_float64, perturb))
    end_sessions()
    one = watched(*case, None, str(Path("one").resolve()), said)
    end_sessions()
    draws = one.trace.draws if one.trace is not None else {}
    many, *_ = pool(size).run(watched, *case, draws, str(Path("many").resolve()), said, next(_firsts))
    return one, many


def proof(
    text: str,
    pool: Any,
    plan: Plan | None = None,
    *arguments: str,
    size: int = 2,
    rounding: bool = False,
    perturb: bool = False,
) -> Proof:
    one, many = sides(text, pool, plan, *arguments, size=size, perturb=perturb)
    mine, theirs = (trace_to_compare(found, "train.py") for found in (one, many))
    assert many.plan is not None
    rounded = sides(text, pool, plan, *arguments, size=size, in_float64=False) if rounding else ()
    traces = [trace_to_compare(found, "train.py") for found in rounded]
    spec = CheckSpec(many.plan, STEPS)
    return prove("train.py", spec, f"{size}xcpu", mine, theirs, traces)
