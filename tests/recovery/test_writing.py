"""A process that dies at any point of a save leaves the older checkpoint or the newer one, and never a mixture."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch

from meshwise.records.checkpoints import PART, checkpoints_in, name_of
from meshwise.recovery import writing as protocol
from meshwise.recovery.layout import LARGE, deal, held, views, within
from meshwise.recovery.loading import open_newest, whole
from meshwise.recovery.saving import Saver
from meshwise.recovery.tensor_files import as_bytes, laid_out
from meshwise.recovery.values import encoded
from meshwise.recovery.writing import Deal, Writing
from meshwise.spec.world import World

OF_THE_PROTOCOL = ("recovery/writing.py", "recovery/tensor_files.py", "records/checkpoints.py")


class FolderBoard:
    """A board for processes of one machine."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def put(self, key: str, text: str) -> None:
        beside = self._folder / f".{key.replace('/', '-')}"
        beside.write_text(text)
        beside.rename(self._folder / key.replace("/", "-"))

    def find(self, key: str) -> str | None:
        path = self._folder / key.replace("/", "-")
        return path.read_text() if path.exists() else None


def state(step: int) -> dict[str, Any]:
    return {"w": torch.full((LARGE // 4,), float(step)), "step": step}


def writing(rank: int, step: int, folder: Path, board: FolderBoard) -> Writing:
    """What `rank` of two, which hold the same, writes."""
    values, tensors = encoded(state(step))
    shapes = {name: held(tensor) for name, tensor in tensors.items()}
    dealt = Deal((), shapes, deal([shapes, shapes]))
    beginning, places, size = laid_out(dealt.parts[rank], shapes)
    buffer = torch.empty(size - len(beginning), dtype=torch.uint8)
    for part, at in places.items():
        source = views(tensors[part.name])[part.held][within(part.box, part.held)]
        begin = at - len(beginning)
        buffer[begin : begin + source.nbytes].view(source.dtype).view(source.shape).copy_(source)
    facts, part_folder = {"step": step, "attempt": 1}, folder / (name_of(step, 1) + PART)
    content = [(beginning, as_bytes(buffer))]
    return Writing(rank, 2, f"save{step}", part_folder, content, dealt, facts, values, board)


def in_a_process(own: Writing, dies_at: int | None, count: Path | None = None) -> int:
    """Write in a process of its own, which is killed before it comes to the line of this number."""
    pid = os.fork()
    if pid:
        return pid
    lines = 0

    def trace(frame: FrameType, event: str, argument: object) -> Any:
        nonlocal lines
        if not frame.f_code.co_filename.endswith(OF_THE_PROTOCOL):
            return None
        if event == "line" and frame.f_code.co_name != "_awaited":  # it waits for as long as it likes
            lines += 1
            if lines == dies_at:
                os.kill(os.getpid(), signal.SIGKILL)
        return trace

    with contextlib.suppress(BaseException):
        sys.settrace(trace)
        own.run()
        sys.settrace(None)
        if count is not None:
            count.write_text(str(lines))
    os._exit(0)


def ended(pids: list[int], seconds: float) -> None:
    """Wait for the processes; who is not done after so many seconds is killed, as the launcher does."""
    deadline = time.monotonic() + seconds
    for pid in pids:
        while time.monotonic() < deadline and os.waitpid(pid, os.WNOHANG) == (0, 0):
            time.sleep(0.001)
        with contextlib.suppress(ProcessLookupError, ChildProcessError):
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def saved_by_two(folder: Path, step: int, victim: int | None = None, at: int | None = None) -> list[int]:
    """Two ranks save, of which one dies. Returns how many lines each ran."""
    words = folder / f"board-{step}-{victim}-{at}"
    words.mkdir(parents=True)
    ranks = [writing(rank, step, folder / "checkpoint", FolderBoard(words)) for rank in (0, 1)]
    counts = [words / f"count{rank}" for rank in (0, 1)]
    pids = [in_a_process(own, at if own.rank == victim else None, counts[own.rank]) for own in ranks]
    if victim is None:
        ended(pids, 30)
    else:
        ended([pids.pop(victim)], 30)
        ended(pids, 0.02)
    return [int(path.read_text()) if path.exists() else 0 for path in counts]


def clear(folder: Path, step: int) -> None:
    for path in (folder / "checkpoint").glob(f"{name_of(step, 1)}*"):
        for file in path.iterdir():
            file.unlink()
        path.rmdir()


@pytest.mark.parametrize("stride", [23, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_killed_at_any_line_leaves_the_older_checkpoint_or_the_newer(
    tmp_path: Path, victim: int, stride: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(protocol, "POLL", 0.0002)
    assert min(saved_by_two(tmp_path, 1)) > 20
    lines = saved_by_two(tmp_path, 2)[victim]
    clear(tmp_path, 2)
    found = []
    for at in sorted({*range(1, lines, stride), lines}):
        saved_by_two(tmp_path, 2, victim, at)
        newest = open_newest(tmp_path / "checkpoint")
        tree = whole(newest.tree)
        assert tree["step"] == newest.saved.step and tree["w"].equal(state(tree["step"])["w"])
        found.append(newest.saved.step)
        clear(tmp_path, 2)
    assert found == sorted(found) or victim == 1  # from one line on it is the newer
    assert 1 in found and (2 in found or victim == 1)


def test_what_a_killed_writer_left_is_cleared_away_by_the_next_session(tmp_path: Path) -> None:
    saved_by_two(tmp_path, 1)
    saved_by_two(tmp_path, 2, victim=0, at=40)
    assert (tmp_path / "checkpoint" / "step-00000002.1.part").exists()
    saver = Saver(tmp_path / "checkpoint", World(), pytest.fail)
    saver.save(lambda _: state(3), {"step": 3}, wait=True)
    saver.settle()
    names = {path.name for path in (tmp_path / "checkpoint").iterdir()}
    assert names == {"step-00000001.1", "step-00000003.2"}


def test_a_rank_that_cannot_write_makes_none_whole_and_every_rank_knows(tmp_path: Path) -> None:
    words = tmp_path / "words"
    words.mkdir()
    board, folder = FolderBoard(words), tmp_path / "checkpoint"
    first, second = (writing(rank, 1, folder, board) for rank in (0, 1))
    (tmp_path / "file").touch()
    second.folder = tmp_path / "file" / "part"
    pid = in_a_process(second, None)
    first.run()
    os.waitpid(pid, 0)
    assert first.said.startswith("rank 1: ") and board.find("save1/whole") == first.said
    assert checkpoints_in(folder) == [] and list(folder.iterdir()) == []
