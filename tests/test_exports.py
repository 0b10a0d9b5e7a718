"""The public names are exactly these, sorted, and no verb hides a room."""

import ast
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

import meshwise

PUBLIC = [
    "CheckpointError",
    "DataError",
    "Job",
    "LossError",
    "Machine",
    "MeshwiseError",
    "Plan",
    "PlanError",
    "TransferError",
    "UsageError",
    "WorkerFailed",
    "accumulate",
    "all_reduce",
    "backward",
    "bench",
    "broadcast",
    "check",
    "comm_log",
    "copy",
    "deferred",
    "device_of",
    "distribute",
    "find_machine",
    "gather",
    "launch",
    "load",
    "load_weights",
    "rank",
    "report",
    "run",
    "save",
    "scatter",
    "sum",
    "to",
    "virtual_devices",
    "world_size",
]


def visible(module: ModuleType) -> set[str]:
    """Names without an underscore that a module holds; its own submodules appear by being imported and do not count."""
    submodules = re.compile(rf"{re.escape(module.__name__)}\..*")
    return {
        name
        for name, value in vars(module).items()
        if not name.startswith("_")
        and not (isinstance(value, ModuleType) and submodules.fullmatch(value.__name__ or ""))
    }


def test_the_public_names_are_these() -> None:
    assert meshwise.__all__ == PUBLIC


def test_the_public_names_are_sorted_and_told_once() -> None:
    assert list(meshwise.__all__) == sorted(set(meshwise.__all__))


def test_nothing_else_is_visible() -> None:
    for name in PUBLIC:
        getattr(meshwise, name)
    assert visible(meshwise) == set(PUBLIC) and dir(meshwise) == PUBLIC


def test_type_checkers_are_told_the_same() -> None:
    stub = ast.parse(Path(meshwise.__file__).with_suffix(".pyi").read_text())
    told = [(node.module, alias.name, alias.asname) for node in ast.walk(stub) for alias in getattr(node, "names", [])]
    assert sorted(told) == sorted((home, name, name) for name, home in meshwise._HOME.items())


@pytest.mark.usefixtures("processes")
def test_importing_the_package_does_not_wait_for_torch() -> None:
    code = "import sys, meshwise, meshwise.cli; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'nope'"):
        meshwise.nope  # noqa: B018


def test_no_public_name_is_a_room() -> None:
    package = Path(meshwise.__file__).parent
    modules = {path.stem for path in package.glob("*.py")} | {
        path.parent.name for path in package.glob("*/__init__.py")
    }
    assert modules.isdisjoint(PUBLIC)


def test_public_names_know_what_they_are() -> None:
    assert all((getattr(meshwise, name).__doc__ or "").strip() for name in PUBLIC)


def test_a_leaked_name_is_seen() -> None:
    module = ModuleType("house")
    module.leak, module.room, module.os = 1, ModuleType("house.room"), ModuleType("os")  # type: ignore[attr-defined]
    assert visible(module) == {"leak", "os"}
