"""What mw.load cannot read is told with the file's name and what to do, not in the words of a zip archive.

Of training/script/files.py."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import meshwise as mw
from meshwise.spec.errors import CheckpointError


class Own:
    """Not a tensor, nor a plain value."""


@pytest.mark.parametrize("left", [0, 5, 200, -200])
def test_a_damaged_file_is_named(left: int, tmp_path: Path) -> None:
    path = tmp_path / "state.pt"
    mw.save({"weight": torch.ones(1000)}, path)
    path.write_bytes(path.read_bytes()[:left])
    with pytest.raises(CheckpointError, match=rf"mw.load\({path}\): the file is damaged, or contains"):
        mw.load(path)


def test_a_text_is_none_of_torchs(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("hello")
    with pytest.raises(CheckpointError, match="Load another file"):
        mw.load(tmp_path / "notes.txt")


def test_an_object_of_the_programs_is_named(tmp_path: Path) -> None:
    torch.save(Own(), tmp_path / "own.pt")
    with pytest.raises(CheckpointError, match=rf"torch.load\(path, weights_only=False\)(.|\n)*{__name__}.Own"):
        mw.load(tmp_path / "own.pt")


def test_a_program_may_begin_anew_where_no_file_is(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        mw.load(tmp_path / "none.pt")
