"""Files that several ranks write are noticed once; a rank's own files, temporary files and caches are not."""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch.utils.tensorboard import SummaryWriter

from meshwise.spec.user_code import place
from meshwise.workers.written_files import FileWatch, WrittenFiles


@pytest.fixture
def told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[str, str]]]:
    """Paths and lines that a worker in `tmp_path` tells of."""
    monkeypatch.chdir(tmp_path)
    found: list[tuple[str, str]] = []
    watch = FileWatch(lambda path, where: found.append((path, where)), ignored=[str(tmp_path / "runs")])
    monkeypatch.setattr(torch, "save", watch.saving(torch.save))
    yield found
    watch._process = 0  # Python gives no hook back: it is that of a process that is gone


def line(function: Callable[..., object], number: int = 1) -> str:
    return place(__file__, function.__code__.co_firstlineno + number)


def write() -> None:
    with open("log.csv", "a") as file:  # noqa: PTH123
        file.write("1, 2")


def save() -> None:
    torch.save({"step": 1}, "best.pt")


def draw() -> None:
    Path("loss.png").write_bytes(b"a picture")


@pytest.mark.parametrize(("function", "file"), [(write, "log.csv"), (save, "best.pt"), (draw, "loss.png")])
def test_a_file_that_the_program_writes_is_told_with_its_line(
    function: Callable[[], None], file: str, told: list[tuple[str, str]], tmp_path: Path
) -> None:
    function()
    function()
    assert told == [(str(tmp_path / file), line(function))]


def test_what_is_no_mistake_is_not_told(told: list[tuple[str, str]], tmp_path: Path) -> None:
    for folder in ("runs", ".cache", "__pycache__"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "x").write_text("x")
    (tmp_path / "data.lock").write_text("")
    (tmp_path / "there").write_text("x")
    told.clear()
    (tmp_path / "there").read_text()
    with (tmp_path / "there").open("r+") as file:
        file.write("y")
    Path(os.devnull).write_text("x")
    with tempfile.NamedTemporaryFile("w") as file:
        file.write("x")
    os.mkfifo("pipe")
    subprocess.run(["cat"], stdin=subprocess.DEVNULL, check=True)
    compile("1", "train.py", "exec")
    assert told == []


def test_events_of_tensorboard_are_those_of_one_folder(told: list[tuple[str, str]]) -> None:
    said = []
    files = WrittenFiles()
    for rank, (folder, comment) in enumerate([("curves", ""), ("curves", "")]):
        with SummaryWriter(folder, comment, filename_suffix=str(rank)) as writer:
            writer.add_scalar("loss", 1.0, 1)
        said.append(files.add(rank, *told[-1]))
    assert len(told) == 2 and "ranks 0 and 1 each write curves, but" in said[1]
    assert said[1].startswith(line(test_events_of_tensorboard_are_those_of_one_folder, 4))


def test_the_first_file_that_two_ranks_write_is_said_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    files = WrittenFiles()
    own = [files.add(rank, str(tmp_path / f"rank{rank}.csv"), "train.py:3") for rank in range(3)]
    assert own == ["", "", ""] and files.add(0, str(tmp_path / "best.pt"), "train.py:9") == ""
    said = files.add(2, str(tmp_path / "best.pt"), "train.py:9")
    assert said.startswith("train.py:9: ranks 0 and 2 each write best.pt, but one device writes once. Write under `if")
    assert files.add(1, str(tmp_path / "best.pt"), "train.py:9") == ""
