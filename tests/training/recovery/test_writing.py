"""A process that dies at any point of a save leaves the older checkpoint or the newer one, and never a mixture."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from meshwise.records.checkpoints import checkpoints_in
from meshwise.spec.world import World
from meshwise.training.recovery import writing as protocol
from meshwise.training.recovery.saving import Saver
from tests.training.recovery.dying_writers import (
    FolderStore,
    begun,
    found,
    harms,
    in_a_process,
    saved_by,
    state,
    writing,
)


@pytest.mark.parametrize("stride", [23, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize(("ranks", "victim"), [(2, 0), (2, 1), pytest.param(3, 2, marks=pytest.mark.slow)])
def test_a_rank_killed_at_any_line_leaves_the_older_checkpoint_or_the_newer(
    ranks: int, tmp_path: Path, victim: int, stride: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(protocol, "POLL", 0.0002)
    begun(tmp_path, ranks)
    lines = saved_by(ranks, tmp_path, 2)[victim]
    assert lines > 20
    steps = []
    for at in sorted({*range(1, lines, stride), lines}):
        begun(tmp_path, ranks)
        saved_by(ranks, tmp_path, 2, victim, at)
        steps.append(found(tmp_path))
    assert steps == sorted(steps) or victim > 0  # from one line on it is the newer
    assert set(steps) <= {1, 2} and 1 in steps and (2 in steps or victim > 0)


@pytest.mark.parametrize("stride", [7, pytest.param(1, marks=pytest.mark.slow)])
def test_every_kind_of_damage_to_every_file_is_noticed(stride: int, tmp_path: Path) -> None:
    whole_one, folder = tmp_path / "whole", tmp_path / "harmed"
    for step in (1, 2):
        saved_by(2, whole_one, step, keep=2)
    assert found(whole_one) == 2
    for name in [*harms(whole_one)][::stride]:
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(whole_one, folder)
        harms(folder)[name]()
        assert found(folder) == 1, name


def test_what_a_killed_writer_left_is_cleared_away_by_the_next_session(tmp_path: Path) -> None:
    saved_by(2, tmp_path, 1)
    saved_by(2, tmp_path, 2, victim=0, at=40)
    assert (tmp_path / "checkpoint" / "step-00000002.1.part").exists()
    saver = Saver(tmp_path / "checkpoint", World(), pytest.fail)
    saver.save(lambda: state(3), {"step": 3}, wait=True)
    saver.settle()
    names = {path.name for path in (tmp_path / "checkpoint").iterdir()}
    assert names == {"step-00000001.1", "step-00000003.2"}


def test_a_rank_that_cannot_write_makes_none_whole_and_every_rank_knows(tmp_path: Path) -> None:
    words = tmp_path / "words"
    words.mkdir()
    store, folder = FolderStore(words), tmp_path / "checkpoint"
    first, second = (writing(rank, 1, folder, store) for rank in (0, 1))
    (tmp_path / "file").touch()
    second.folder = tmp_path / "file" / "part"
    pid = in_a_process(second, None)
    first.run()
    os.waitpid(pid, 0)
    assert first.said.startswith("rank 1: ") and store.get("save1/whole").decode() == first.said
    assert checkpoints_in(folder) == [] and list(folder.iterdir()) == []
