"""Run folders: never two runs in one, and a sentence where none can be made or read."""

from pathlib import Path

import pytest

from meshwise.records.folder import RUN, create_run_folder, read_run, update_run, write_run
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
    with pytest.raises(UsageError, match=r"--out .*no folder can be made there.* Name another with --out DIR"):
        create_run_folder(tmp_path / below, "mlp")


def test_facts_are_changed_one_by_one(tmp_path: Path) -> None:
    write_run(tmp_path, {"job": "mlp", "status": "running"})
    update_run(tmp_path, status="finished", ended="now")
    assert read_run(tmp_path) == {"job": "mlp", "status": "finished", "ended": "now"}


def test_a_folder_without_a_run_is_told(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"no run folder \(there is no run.json in it\)"):
        read_run(tmp_path / "nowhere")


@pytest.mark.parametrize(("text", "says"), [('{"job": ', "cannot be read"), ("[1]", "not the facts of a run")])
def test_a_damaged_record_of_a_run_is_told(tmp_path: Path, text: str, says: str) -> None:
    (tmp_path / RUN).write_text(text)
    with pytest.raises(UsageError, match=says) as caught:
        read_run(tmp_path)
    assert "\n" not in str(caught.value)
