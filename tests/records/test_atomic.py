"""A file is whole or not there, whatever happens while it is written."""

from pathlib import Path

import pytest

from meshwise.records.files import atomic_file, write_text, write_with


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
