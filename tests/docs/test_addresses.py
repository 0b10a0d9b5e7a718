"""Whatever is refused has its part of docs/, which the terminal names: src/meshwise/spec/addresses.toml is the table.

That each part is there: test_readme.py.
Tests spec/addresses.py.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import meshwise as mw
from meshwise.spec import errors
from meshwise.spec.addresses import PACKAGE, address_of, addresses, more
from meshwise.spec.errors import MeshwiseError, UsageError, WorkerFailed, check_known
from meshwise.spec.plan import Plan
from meshwise.workers.failure import by_error

REFUSE = {name for name, it in vars(errors).items() if isinstance(it, type) and issubclass(it, MeshwiseError)}
REFUSE = REFUSE - {"WorkerFailed"} | {"SchedulerError"}  # a worker's end has the address of what failed in it


def refusing(tree: ast.Module) -> set[str]:
    """Functions of a file that make such an error, and those that raise what such a function has made."""
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    names = {f.name: {_name(call.func) for call in ast.walk(f) if isinstance(call, ast.Call)} for f in functions}
    makers = {name for name, called in names.items() if called & REFUSE}
    raisers = {f.name for f in functions for node in ast.walk(f) if isinstance(node, ast.Raise) and _of(node) in makers}
    return makers | raisers


def _of(node: ast.Raise) -> str:
    return _name(node.exc.func) if isinstance(node.exc, ast.Call) else ""


def _name(node: ast.expr) -> str:
    return node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")


def of_the_package() -> dict[str, set[str]]:
    files = {f.relative_to(PACKAGE).with_suffix("").as_posix(): f for f in sorted(PACKAGE.rglob("*.py"))}
    found = {place: refusing(ast.parse(file.read_text(encoding="utf-8"))) for place, file in files.items()}
    return {place: functions for place, functions in found.items() if functions}


def test_whatever_refuses_stands_in_the_table() -> None:
    refuse = of_the_package().keys() - {"spec/errors"}
    assert refuse - addresses().keys() == set(), "name the part of docs/ that says more of these refusals"


def test_whatever_stands_in_the_table_refuses() -> None:
    refuse = of_the_package()
    strange = [
        place
        for place in addresses()
        if place not in refuse and place.rpartition("/")[2] not in refuse.get(place.rpartition("/")[0], ())
    ]
    assert strange == []


def refused_by(call: object, *given: object, **named: object) -> MeshwiseError:
    with pytest.raises(MeshwiseError) as caught:
        call(*given, **named)  # type: ignore[operator]
    return caught.value


def test_an_error_has_the_address_of_the_module_that_refuses() -> None:
    error = refused_by(Plan, recompute="sometimes")
    assert address_of(error) == "plans.md#what-each-field-does"
    assert more(address_of(error)) == "more      docs/plans.md#what-each-field-does"


def test_a_function_has_an_address_of_its_own() -> None:
    assert address_of(refused_by(mw.log, loss="low")) == "api.md#mwlog"
    assert address_of(refused_by(mw.log_to, 3)) == "jobs.md"


def test_nothing_is_said_where_the_sentence_says_all_or_the_program_raised_it() -> None:
    def program() -> None:
        raise UsageError("not on Sundays.")

    def asks() -> None:
        check_known("day", "Sunday", ["Monday"])

    assert address_of(refused_by(program)) == address_of(refused_by(asks)) == ""
    assert address_of(UsageError("never raised")) == address_of(WorkerFailed("stopped")) == more("") == ""


def test_an_address_goes_from_the_worker_to_who_tells_its_end() -> None:
    failure = by_error(1, refused_by(Plan, recompute="sometimes"))
    assert address_of(WorkerFailed("text", failure=failure)) == "plans.md#what-each-field-does"
    assert by_error(1, ValueError("of the program")).more == ""


def test_a_notebook_shows_the_sentence_and_the_address() -> None:
    shown = refused_by(mw.log, loss="low")._render_traceback_()
    assert [line.partition(":")[0] for line in shown] == ["UsageError", "more      docs/api.md#mwlog"]


def said(*words: str, at: Path) -> list[str]:
    done = subprocess.run([sys.executable, "-m", "meshwise", *words], cwd=at, capture_output=True, text=True)
    assert done.returncode == 2, done.stderr
    return done.stderr.splitlines()


def test_a_command_ends_with_the_address(processes: None, tmp_path: Path) -> None:
    *_, refused, address = said("run", "mnist-mlp", "--devices", "2xcpu", "--set", "shard=4", at=tmp_path)
    assert refused.startswith("PlanError: shard=4 needs 4 devices")
    assert address == "more      docs/plans.md"
    assert said("run", "--json", "train.py", at=tmp_path)[-1].startswith("UsageError: --json")


def test_what_a_worker_refuses_ends_with_the_address(processes: None, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text('import meshwise as mw\n\nmw.distribute(3, view="rank")\n')
    *_, refused, address = said("run", "--devices", "2xcpu", "train.py", at=tmp_path)
    assert "mw.distribute takes models" in refused
    assert address == "more      docs/api.md#mwdistribute"
