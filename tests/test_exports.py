"""The public names are those that `__init__.pyi` lists, each from its module, and none hides a room."""

import ast
import inspect
import re
import subprocess
import sys
import tomllib
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest

import meshwise

OF_0_1 = [
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


STUB = Path(meshwise.__file__).with_suffix(".pyi")


def listed() -> list[tuple[str, str, str]]:
    """Module, name and public name of each import of the stub, in the order of its lines."""
    nodes = [node for node in ast.parse(STUB.read_text()).body if isinstance(node, ast.ImportFrom)]
    return [(node.module or "", alias.name, alias.asname or "") for node in nodes for alias in node.names]


def test_the_public_names_are_those_that_type_checkers_read() -> None:
    assert meshwise.__all__ == sorted(public for _, _, public in listed())
    assert len(set(meshwise.__all__)) == len(meshwise.__all__)


def test_each_name_is_listed_as_itself_and_comes_from_its_module() -> None:
    for module, name, public in listed():
        assert name == public  # `import x as x`: type checkers take it for public
        assert getattr(meshwise, name) is getattr(import_module(module), name)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_name_of_the_first_release_is_still_there() -> None:
    assert [name for name in OF_0_1 if not hasattr(meshwise, name)] == []


def test_a_renamed_name_warns_and_is_the_new_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(meshwise._RENAMED, "Scheme", "Plan")
    with pytest.warns(DeprecationWarning, match=r"meshwise\.Scheme has a new name\. Use meshwise\.Plan"):
        assert meshwise.Scheme is meshwise.Plan  # type: ignore[attr-defined]


def test_every_new_name_of_a_renamed_one_is_public() -> None:
    assert set(meshwise._RENAMED.values()) <= set(meshwise.__all__)
    assert set(meshwise._RENAMED).isdisjoint(meshwise.__all__)


def test_nothing_else_is_visible() -> None:
    for name in meshwise.__all__:
        getattr(meshwise, name)
    assert visible(meshwise) == set(meshwise.__all__) == set(dir(meshwise))


def test_return_types_of_verbs_are_public() -> None:
    returned = {"run": "RunSummary", "report": "Report", "bench": "Bench", "load_weights": "Loaded"}
    for verb, kind in returned.items():
        assert inspect.signature(getattr(meshwise, verb), eval_str=True).return_annotation is getattr(meshwise, kind)
    either = inspect.signature(meshwise.check, eval_str=True).return_annotation
    assert either == meshwise.Proof | meshwise.PlainProof


def test_the_version_is_in_one_place(command: Callable[..., tuple[int, str, str]]) -> None:
    project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())
    assert project["project"]["dynamic"] == ["version"] and "version" not in project["project"]
    assert Path(project["tool"]["hatch"]["version"]["path"]).name == "__init__.py"
    assert command("--version")[:2] == (0, f"meshwise {meshwise.__version__}\n")


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
    assert modules.isdisjoint(meshwise.__all__)


def test_public_names_know_what_they_are() -> None:
    assert all((getattr(meshwise, name).__doc__ or "").strip() for name in meshwise.__all__)


def test_a_leaked_name_is_seen() -> None:
    module = ModuleType("house")
    module.leak, module.room, module.os = 1, ModuleType("house.room"), ModuleType("os")  # type: ignore[attr-defined]
    assert visible(module) == {"leak", "os"}
