"""`meshwise runs`: listed, filtered, removed."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

OLD = Path(__file__).parents[1] / "old" / "runs"
Typed = Callable[..., tuple[object, str, str]]


@pytest.fixture
def typed(command: Typed, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Typed:
    """Exit code, output and errors of `meshwise runs` in a folder with the runs of earlier releases."""
    shutil.copytree(OLD, tmp_path / "runs")
    (tmp_path / "runs" / "damaged").mkdir()
    (tmp_path / "runs" / "damaged" / "run.json").write_text("{")
    monkeypatch.chdir(tmp_path)
    return partial(command, "runs")


def test_the_table_has_every_run_and_what_it_did(typed: Typed) -> None:
    code, out, _ = typed()
    assert not code
    rows = {line.split()[0]: line for line in out.splitlines() if line}
    assert {"finished", "stopped", "shard", "zero1", "script", "damaged"} <= rows.keys()
    assert "shard=2, precision='fp64'" in rows["shard"] and "error   1.5658" in rows["shard"]
    assert "unreadable" in rows["damaged"] and "6 runs" in out.splitlines()[-1]


def test_filters(typed: Typed) -> None:
    def names(*words: str) -> list[str]:
        return [Path(entry["folder"]).name for entry in json.loads(typed(*words, "--json")[1])]

    assert sorted(names("--only", "stopped")) == ["shard", "stopped", "zero1"]
    assert names("--only", "ero") == ["zero1"]
    assert names("--only", "train") == ["script"]
    assert names("--only", "train", "--only", "failed") == []


def test_json_has_plain_values(typed: Typed) -> None:
    (entry,) = json.loads(typed("--only", "zero1", "--json")[1])
    assert (entry["folder"], entry["metric"]) == ("runs/zero1", "error")
    assert entry["best"] == pytest.approx(1.5948, 1e-3)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("remove shard", "meshwise runs remove --yes NAME"),
        ("remove --yes nothing shard", "there is no run nothing in"),
        ("--only failed remove --yes shard", "takes only names"),
    ],
)
def test_what_cannot_be_is_one_sentence_and_removes_nothing(typed: Typed, words: str, said: str) -> None:
    code, _, err = typed(*words.split())
    assert code == 2 and err.startswith("UsageError: ") and said in err
    assert Path("runs/shard/run.json").exists()


def test_remove(typed: Typed) -> None:
    code, out, _ = typed("remove", "--yes", "shard", "zer")
    assert not code and "removed     runs/shard" in out
    assert sorted(path.name for path in Path("runs").iterdir()) == ["damaged", "finished", "script", "stopped"]


def test_a_running_run_is_kept_unless_forced(typed: Typed) -> None:
    facts = json.loads(Path("runs/shard/run.json").read_text()) | {"status": "running"}
    Path("runs/shard/run.json").write_text(json.dumps(facts))
    code, _, err = typed("remove", "--yes", "shard")
    assert code == 2 and "or --force" in err and Path("runs/shard").exists()
    assert not typed("remove", "--yes", "--force", "shard")[0] and not Path("runs/shard").exists()


def test_no_runs(typed: Typed, tmp_path: Path) -> None:
    code, out, _ = typed("--in", str(tmp_path / "nowhere"))
    assert not code and "No such run in" in out and "--in DIR" in out
