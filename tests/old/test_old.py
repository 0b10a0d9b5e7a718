"""What an earlier version wrote is reported and read: README.md says how the files were made."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from meshwise.spec.plan_file import plan_from_toml

OLD = Path(__file__).parent
MACHINES = sorted(path.stem for path in (OLD / "machines").glob("*.toml"))
PLANS = sorted(path.stem for path in (OLD / "plans").glob("*.toml"))
RENAMED = {
    "last_times": "last_arrivals",
    "late_seconds": "straggler_seconds",
    "meetings": "sync_points",
    "watching_seconds": "overhead_seconds",
}
"""Keys of --json that have another name since."""
CLOSE = {"rel": 1e-9, "abs": 1e-12}  # float64, and the same numbers in another order at most

Command = Callable[..., str]


@pytest.fixture
def old(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the old files as the current folder: the jobs of the runs are named relative to it."""
    shutil.copytree(OLD, tmp_path / "old")
    monkeypatch.chdir(tmp_path / "old")
    return tmp_path / "old"


@pytest.fixture
def command(command: Callable[..., tuple[int, str, str]]) -> Command:
    """`command("report", "RUN", "--json")`: what it prints, after it ended with 0."""

    def call(*words: object) -> str:
        code, shown, said = command(*words)
        assert code == 0, said
        return shown

    return call


def expected(name: str) -> Any:
    return json.loads((OLD / "expected" / f"{name}.json").read_text())


def differences(was: Any, now: Any, where: str = "") -> Iterator[str]:
    """Where a number, a truth value or a length of `was` is another one in `now`, which may hold more."""
    if isinstance(was, dict) and isinstance(now, dict):
        for key, value in was.items():
            key = RENAMED.get(key, key)
            if key not in now:
                yield f"{where}.{key} is missing"
            else:
                yield from differences(value, now[key], f"{where}.{key}")
    elif isinstance(was, list) and isinstance(now, list) and len(was) == len(now):
        for index, (one, other) in enumerate(zip(by_ends(was), by_ends(now), strict=True)):
            yield from differences(one, other, f"{where}[{index}]")
    elif isinstance(was, float) and isinstance(now, int | float) and not isinstance(now, bool):
        if not math.isclose(was, now, rel_tol=CLOSE["rel"], abs_tol=CLOSE["abs"]):
            yield f"{where}: {was} was told, now {now}"
    elif isinstance(was, str) != isinstance(now, str) or (not isinstance(was, str) and was != now):
        yield f"{where}: {was!r} was told, now {now!r}"


def by_ends(values: list[Any]) -> list[Any]:
    """Links in the order of their ends, collectives in that of their names and sizes: a file may hold them in any."""
    if all(isinstance(value, dict) and {"bus_bandwidth", "count"} <= value.keys() for value in values):
        return sorted(values, key=lambda collective: (collective["name"], collective["bytes"]))
    if all(isinstance(value, dict) and {"source", "target"} <= value.keys() for value in values):
        return sorted(values, key=lambda link: (link["source"], link["target"]))
    return values


def as_it_was(view: dict[str, Any]) -> None:
    """Earlier, a collective's bar began with its waiting, and `blocked` was the attribution to two kinds."""
    waits = {(bar["rank"], bar["lane"], bar["collective"]): bar for bar in view["bars"] if bar["found"]}
    for bar in view["bars"]:
        wait = waits.get((bar["rank"], bar["lane"], bar["collective"]))
        if bar["kind"] == "communication" and wait is not None:
            assert bar["start"] == pytest.approx(wait["start"] + wait["seconds"], abs=1e-9)
            bar["start"], bar["seconds"] = wait["start"], bar["seconds"] + wait["seconds"]
    view["blocked"] = [bar for bar in view["attributed"] if bar["kind"] in ("waiting", "communication")]


def test_the_comparison_sees_every_kind_of_difference() -> None:
    was = {"a": [1, 2.0], "b": None, "c": True, "d": "words"}
    assert not list(differences(was, {"a": [1, 2.0], "b": None, "c": True, "d": "other words", "e": 1}))
    for key, value in {"a": [1], "b": 0, "c": False, "d": 3}.items():
        assert list(differences(was, was | {key: value})), key
    assert list(differences(was, was | {"a": [1, 2.1]})) and list(differences(was, {"a": [1, 2.0]}))


@pytest.mark.parametrize("name", ["finished", "stopped", "script"])
def test_a_run_has_the_report_that_it_had(old: Path, command: Command, name: str) -> None:
    plain = json.loads(command("report", f"runs/{name}", "--json"))
    for view in plain["views"]:
        as_it_was(view)
    plain["findings"] = [finding for finding in plain["findings"] if finding["kind"] != "slower"]  # which is new
    assert list(differences(expected(f"report_{name}"), plain | {"folder": name})) == []
    assert plain["status"] == ("stopped" if name == "stopped" else "finished")


@pytest.mark.parametrize("name", ["finished", "stopped", "shard", "zero1", "script"])
def test_a_run_has_every_other_form_of_report(old: Path, command: Command, name: str) -> None:
    assert command("report", f"runs/{name}", "--html", "--trace").count("written") == 2
    assert command("report", f"runs/{name}", "--mermaid").startswith("gantt\n")
    assert command("report", f"runs/{name}")


def test_two_runs_are_compared(old: Path, command: Command) -> None:
    assert json.loads(command("report", "runs/stopped", "runs/finished", "--json"))


@pytest.mark.parametrize("name", PLANS)
def test_a_plan_file_is_read(name: str) -> None:
    want = expected("plans")[name]
    plan = plan_from_toml((OLD / "plans" / f"{name}.toml").read_text(), want["devices"])
    assert json.loads(json.dumps(vars(plan)))  # a plan stays plain values
    for field, value in want["fields"].items():
        found = getattr(plan, field)
        assert (list(found) if isinstance(found, tuple) else found) == value, field


@pytest.mark.parametrize("name", MACHINES)
def test_a_machine_file_is_read(old: Path, command: Command, name: str) -> None:
    plain = json.loads(command("devices", f"machines/{name}.toml", "--json"))
    assert list(differences(expected(f"machine_{name}"), plain)) == []


def test_a_measured_machine_keeps_its_figures(old: Path, command: Command) -> None:
    plain = json.loads(command("devices", "machines/measured.toml", "--json"))
    assert plain["devices"][0]["launch"] == 5.094e-6 and "gloo both ways" in plain["links"][0]["timings"]
