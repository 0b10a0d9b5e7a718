"""A file is whole or not there, whatever happens while it is written."""

from pathlib import Path

import pytest

from meshwise.records.files import append_lines, atomic_file, is_lost, make_folder, stay_in, write_text, write_with


class Interrupted(BaseException):
    """Not an Exception: like Ctrl-C, it passes every `except Exception`."""


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, Interrupted])
def test_a_failing_body_leaves_nothing(tmp_path: Path, error: type[BaseException]) -> None:
    with pytest.raises(error), atomic_file(tmp_path / "state.pt") as file:
        file.write(b"half")
        file.flush()
        raise error
    assert list(tmp_path.iterdir()) == []


def test_a_failing_body_leaves_the_earlier_file_whole(tmp_path: Path) -> None:
    path = tmp_path / "state.pt"
    write_text(path, "earlier")
    with pytest.raises(OSError), atomic_file(path) as file:
        file.write(b"half")
        raise OSError
    assert path.read_text() == "earlier"
    assert list(tmp_path.iterdir()) == [path]


def test_nothing_is_seen_at_the_path_before_the_body_ends(tmp_path: Path) -> None:
    path = tmp_path / "state.pt"
    write_text(path, "earlier")
    with atomic_file(path) as file:
        file.write(b"new")
        file.flush()
        assert path.read_text() == "earlier"
    assert path.read_text() == "new"
    assert list(tmp_path.iterdir()) == [path]


def test_missing_folders_are_made_and_text_is_utf_8(tmp_path: Path) -> None:
    path = tmp_path / "a" / "b" / "plan.toml"
    write_text(path, "5 µs")
    assert path.read_bytes() == "5 µs".encode()


def test_a_writer_that_fails_leaves_nothing(tmp_path: Path) -> None:
    def write(file: object) -> None:
        raise RuntimeError("disk full")

    with pytest.raises(RuntimeError, match="disk full"):
        write_with(tmp_path / "weights", write)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_goes_away_after_the_look_at_it_is_not_made_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    stay_in(folder)
    make_folder(folder / "checkpoint" / "step-1")
    make_folder(tmp_path / "other" / "run")
    assert (folder / "checkpoint" / "step-1").is_dir() and (tmp_path / "other" / "run").is_dir()
    folder.rename(tmp_path / "elsewhere")
    monkeypatch.setattr("meshwise.records.files.is_lost", lambda path: False)
    with pytest.raises(FileNotFoundError):
        make_folder(folder / "checkpoint" / "step-2")
    assert not folder.exists()


@pytest.mark.parametrize("gone", ["removed", "moved", "another"])
def test_a_folder_that_is_lost_is_not_made_anew(gone: str, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    stay_in(folder)
    append_lines(folder / "spans" / "rank0.jsonl", [{"a": 1}])
    assert not is_lost(folder) and not is_lost(tmp_path / "other")
    folder.rename(tmp_path / "elsewhere")
    if gone == "another":
        folder.mkdir()
    assert is_lost(folder)
    for write in (lambda path: append_lines(path, [{"a": 1}]), lambda path: write_text(path, "")):
        with pytest.raises(FileNotFoundError, match="the run folder was removed or moved"):
            write(folder / "spans" / "new" / "rank0.jsonl")
    assert not (folder / "spans").exists()


def test_processes_with_one_id_write_a_file_at_once(tmp_path: Path) -> None:
    """Containers on several machines: each has a process 1."""
    path = tmp_path / "plan.toml"
    with atomic_file(path) as one, atomic_file(path) as other:
        one.write(b"data = 2")
        other.write(b"data = 2")
    assert path.read_bytes() == b"data = 2" and list(tmp_path.iterdir()) == [path]
