"""A save that fails stops nothing and harms no older checkpoint; how many are kept; what saving waits for."""

from __future__ import annotations

import errno
import threading
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock as Mock

import pytest
import torch

from meshwise.records.checkpoints import Checkpoint, checkpoints_in, size_of
from meshwise.spec.errors import UsageError
from meshwise.spec.saves import Saves
from meshwise.spec.world import World
from meshwise.training.recovery import saving, writing
from meshwise.training.recovery.loading import load, whole
from meshwise.training.recovery.saving import BACKGROUND, Saver


def state(step: int) -> dict[str, Any]:
    return {"step": step, "w": torch.full((1000,), float(step))}


def save(saver: Saver, *steps: int) -> list[bool]:
    return [saver.save(lambda step=step: state(step), {"step": step}, wait=step < 0) for step in steps]


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_the_state_is_that_of_the_call_whatever_training_does_meanwhile(tmp_path: Path) -> None:
    saver, tensor = Saver(tmp_path, World(), pytest.fail), torch.zeros(1000)
    saver.save(lambda: {"w": tensor}, {"step": 1})
    tensor += 1
    saver.settle()
    assert whole(load(tmp_path).tree)["w"].equal(torch.zeros(1000))


def full(monkeypatch: pytest.MonkeyPatch, room: int) -> None:
    """The disk takes so many bytes more, of this process alone."""
    left, real = [room], Path.open

    def opened(path: Path, mode: str = "r", *args: Any, **named: Any) -> Any:
        file: Any = real(path, mode, *args, **named)
        if mode != "wb":
            return file

        def write(chunk: memoryview) -> int:
            if not left[0]:
                raise OSError(errno.ENOSPC, "No space left on device")
            taken = file.write(chunk[: left[0]])
            left[0] -= taken
            return int(taken)

        limited = Mock(wraps=file, write=write)
        limited.__enter__ = lambda _: limited
        limited.__exit__ = lambda *error: file.close()
        return limited

    monkeypatch.setattr(Path, "open", opened)


@pytest.mark.parametrize("room", [0, 100, 3000])
def test_a_full_disk_is_told_in_a_line_and_the_next_save_is_tried(
    tmp_path: Path, room: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    saver = Saver(tmp_path, World(), said.append)
    save(saver, 1)
    saver.settle()
    with monkeypatch.context() as patch:
        full(patch, room)
        assert save(saver, 2) == [True]  # training goes on
        saver.settle()
        saver_said = [*said]
        assert save(saver, 2) == [True] and (saver.settle(), said == saver_said)[1]
    assert saver.saved == 1 and "No space left on device" in saver.wrong
    (line,) = said
    assert line.startswith("step 2 could not be saved: rank 0: ") and "B free" in line and "\n" not in line
    assert names(tmp_path) == ["step-00000001.1"]
    assert whole(load(tmp_path).tree)["w"].equal(torch.ones(1000))
    save(saver, 3)
    saver.settle()
    assert said[1:] == ["saving works again: step 3 is saved."]
    assert (saver.saved, saver.wrong) == (3, "") and names(tmp_path) == ["step-00000001.1", "step-00000003.1"]


def test_a_folder_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    (tmp_path / "checkpoint").write_text("a file")
    said: list[str] = []
    saver = Saver(tmp_path / "checkpoint", World(), said.append)
    assert save(saver, 1) == [True]
    saver.settle()
    assert "step 1 could not be saved" in said[0] and "Not a directory" in saver.wrong


def test_a_save_that_would_wait_too_long_is_left_out_and_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    saver, slow, real = Saver(tmp_path, World(), said.append), threading.Event(), writing.write_file
    monkeypatch.setattr(writing, "write_file", lambda *given: (slow.wait(), real(*given))[1])
    monkeypatch.setattr(saving, "PATIENCE", 0.0)
    assert save(saver, 1, 2) == [True, False]
    assert said == ["step 2 is not saved: the state before it is still being written."]
    slow.set()
    saver.settle()
    assert save(saver, 3) == [True]
    saver.settle()
    assert names(tmp_path) == ["step-00000001.1", "step-00000003.1"]


def test_what_no_checkpoint_can_hold_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"f is a builtins\.function"):
        Saver(tmp_path, World(), pytest.fail).save(lambda: {"f": lambda: 1}, {"step": 1})


@pytest.mark.parametrize(
    ("settings", "left"),
    [
        ({}, [4, 5]),
        ({"keep": 1}, [5]),
        ({"keep": 3}, [3, 4, 5]),
    ],
)
def test_so_many_are_kept(tmp_path: Path, settings: dict[str, int], left: list[int]) -> None:
    saver = Saver(tmp_path, World(), pytest.fail, saves=Saves(**settings))
    save(saver, 1, 2, 3, 4, 5)
    saver.settle()
    assert [saved.step for saved in checkpoints_in(tmp_path)] == left
    assert all(4000 < size_of(saved.path) < 6000 for saved in checkpoints_in(tmp_path))


def test_what_a_run_left_behind_goes_first(tmp_path: Path) -> None:
    before = Saver(tmp_path, World(), pytest.fail, saves=Saves(keep=9))
    save(before, 1, 2, 3)
    before.settle()
    resumed = Checkpoint(1, 1, tmp_path / "step-00000001.1")  # the newer ones were found damaged
    saver = Saver(tmp_path, World(), pytest.fail, saves=Saves(keep=2), resumed=resumed)
    save(saver, 2)
    saver.settle()
    assert names(tmp_path) == ["step-00000001.1", "step-00000002.2"]


@pytest.mark.parametrize("settings", [{}, {"keep": 3}, {"steps": 9}])
def test_states_of_the_background_go_once_another_stands(tmp_path: Path, settings: dict[str, int]) -> None:
    saver = Saver(tmp_path, World(), pytest.fail, saves=Saves(**settings))
    for step, background in ((1, False), (2, True), (3, True), (4, False)):
        saver.save(lambda step=step: state(step), {"step": step, BACKGROUND: background}, wait=True)
        saver.settle()
    kept = {"keep": [1, 4], "steps": [3, 4]}.get(next(iter(settings), ""), [4])
    assert [saved.step for saved in checkpoints_in(tmp_path)] == kept
