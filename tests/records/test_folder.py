"""Run folders: never two runs in one, and a sentence where none can be made or read."""

from pathlib import Path

import pytest

from meshwise.records.folder import (
    RUN,
    begin_session,
    create_run_folder,
    end_session,
    newest_run,
    read_run,
    what_was_typed,
)
from meshwise.spec.errors import UsageError


def test_runs_of_the_same_second_get_folders_of_their_own(tmp_path: Path) -> None:
    folders = [create_run_folder(tmp_path / "runs", "mnist-mlp") for _ in range(5)]
    assert len(set(folders)) == 5
    assert all(folder.is_dir() and "-mnist-mlp" in folder.name for folder in folders)


@pytest.mark.parametrize(
    ("job", "ending"),
    [
        ("gpt:llama3-8b", "-gpt-llama3-8b"),
        ("../../etc/passwd", "-..-..-etc-passwd"),
        ("my job/ä", "-my-job"),
        ("ä", "-run"),
        ("examples/01_mnist.py", "-01_mnist"),
    ],
)
def test_a_job_name_becomes_one_plain_folder_name(tmp_path: Path, job: str, ending: str) -> None:
    folder = create_run_folder(tmp_path, job)
    assert folder.parent == tmp_path
    assert folder.name.endswith(ending)
    assert folder.name[:15].replace("-", "").isdigit()


@pytest.mark.parametrize("below", ["file", "file/deeper"])
def test_a_file_in_the_way_is_told(tmp_path: Path, below: str) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match=r"--out .*no folder can be made in it.* Name another folder with --out DIR"):
        create_run_folder(tmp_path / below, "mlp")


def test_a_run_that_is_gone_on_with_has_two_sessions(tmp_path: Path) -> None:
    begin_session(tmp_path, 1000.0, job="mlp")
    end_session(tmp_path, "failed", "rank 1 was killed")
    assert read_run(tmp_path)["error"] == "rank 1 was killed"
    begin_session(tmp_path, 2000.0, devices=["cpu"])
    run = read_run(tmp_path)
    assert run["status"] == "running" and run["ended"] is None and run["error"] is None and run["job"] == "mlp"
    end_session(tmp_path, "finished")
    run = read_run(tmp_path)
    assert [session["status"] for session in run["sessions"]] == ["failed", "finished"]
    assert [session["began"] for session in run["sessions"]] == [1000.0, 2000.0]
    assert all(session["ended"] > 1e9 for session in run["sessions"]) and run["status"] == "finished"
    assert run["started"] == "1970-01-01T00:16:40+00:00"


def test_the_newest_run_is_the_one_that_began_last(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="there is no run in"):
        newest_run(tmp_path)
    for name, began in (("a", 300.0), ("b", 100.0)):
        (tmp_path / name).mkdir()
        begin_session(tmp_path / name, began)
    assert newest_run(tmp_path).name == "a"


def test_a_folder_without_a_run_is_told(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"is not a run folder \(it has no run.json\)"):
        read_run(tmp_path / "nowhere")


@pytest.mark.parametrize(
    ("text", "says"), [('{"job": ', "cannot be read"), ("[1]", "does not contain the record of a run")]
)
def test_a_damaged_record_of_a_run_is_told(tmp_path: Path, text: str, says: str) -> None:
    (tmp_path / RUN).write_text(text)
    with pytest.raises(UsageError, match=says) as caught:
        read_run(tmp_path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("typed", "kept"),
    [
        (["/usr/bin/meshwise", "run", "a b.py"], "meshwise run 'a b.py'"),
        (["/x/meshwise/__main__.py", "runs"], "python -m meshwise runs"),
    ],
)
def test_the_command_is_kept_as_it_can_be_typed(monkeypatch: pytest.MonkeyPatch, typed: list[str], kept: str) -> None:
    monkeypatch.setattr("sys.argv", typed)
    assert what_was_typed()["command"] == kept
