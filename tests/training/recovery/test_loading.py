"""A saved state comes back whole, from the newest checkpoint that is; what is damaged is told in one sentence."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from meshwise.records.checkpoints import MANIFEST, checkpoints_in
from meshwise.spec.errors import CheckpointError
from meshwise.spec.saves import Saves
from meshwise.spec.world import World
from meshwise.training.recovery.loading import Loaded, load, whole
from meshwise.training.recovery.saving import Saver


def state(step: int) -> dict[str, Any]:
    return {"step": step, "model": {"w": torch.full((300, 3), float(step))}, "betas": (0.9, 0.99)}


def save(folder: Path, *steps: int) -> None:
    saver = Saver(folder, World(), pytest.fail, saves=Saves(keep=9))
    for step in steps:
        assert saver.save(lambda step=step: state(step), {"step": step, "epoch": 1}, wait=True)
    saver.settle()
    assert (saver.saved, saver.wrong) == (steps[-1], "")


def loaded(folder: Path, **more: Any) -> tuple[Loaded, list[str]]:
    said: list[str] = []
    return load(folder, World(), said.append, **more), said


def test_the_newest_state_comes_back(tmp_path: Path) -> None:
    save(tmp_path / "checkpoint", 5, 10)
    found, said = loaded(tmp_path / "checkpoint")
    assert (found.saved.step, said) == (10, [])
    tree = whole(found.tree)
    assert tree["model"]["w"].equal(torch.full((300, 3), 10.0)) and tree["betas"] == (0.9, 0.99)


def test_an_earlier_one_can_be_asked_for(tmp_path: Path) -> None:
    save(tmp_path, 5, 10)
    assert loaded(tmp_path, only="step-00000005.1")[0].saved.step == 5
    with pytest.raises(CheckpointError, match=r"step-00000007\.1: there is no checkpoint"):
        loaded(tmp_path, only="step-00000007.1")


def test_a_session_that_went_back_is_the_newer_one(tmp_path: Path) -> None:
    save(tmp_path, 40)
    save(tmp_path, 30)
    assert [path.name for path in sorted(tmp_path.iterdir())] == ["step-00000030.2", "step-00000040.1"]
    assert loaded(tmp_path)[0].saved.step == 30


def file(path: Path) -> Path:
    return path / "rank0.safetensors"


def flip(path: Path, at: float = 0.7) -> None:
    content = bytearray(path.read_bytes())
    content[int(len(content) * at)] ^= 1
    path.write_bytes(content)


def hole(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-2000:-1000] = bytes(1000)
    path.write_bytes(content)


def swap(one: Path, other: Path) -> None:
    between = one.with_suffix(".between")
    one.rename(between)
    other.rename(one)
    between.rename(other)


def older(path: Path) -> Path:
    return path.with_name("step-00000001.1")


def a_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "flipped bit": (lambda at: flip(file(at)), "rank0.safetensors is damaged: its hash differs from"),
    "flipped header": (lambda at: flip(file(at), 0.01), "its hash differs from the recorded one"),
    "hole": (lambda at: hole(file(at)), "rank0.safetensors is damaged"),
    "cut off": (lambda at: file(at).write_bytes(file(at).read_bytes()[:-10]), "has 3,"),
    "longer": (lambda at: file(at).write_bytes(file(at).read_bytes() + b"x"), "has 3,"),
    "empty": (lambda at: file(at).write_bytes(b""), "has 0 bytes instead of 3,"),
    "gone": (lambda at: file(at).unlink(), "rank0.safetensors is missing"),
    "a folder": (lambda at: (file(at).unlink(), file(at).mkdir()), "rank0.safetensors is missing"),
    "a pipe": (lambda at: a_pipe(file(at)), "rank0.safetensors is missing"),
    "swapped": (lambda at: swap(file(at), file(older(at))), "rank0.safetensors is damaged"),
    "manifest gone": (lambda at: (at / MANIFEST).unlink(), "manifest.json is missing"),
    "manifest flipped": (lambda at: flip(at / MANIFEST), "manifest.json is damaged"),
    "manifest's hash flipped": (lambda at: flip(at / MANIFEST, 0.02), "manifest.json is damaged"),
    "manifest's end": (lambda at: (at / MANIFEST).write_text((at / MANIFEST).read_text()[:-2]), "is damaged"),
    "manifest empty": (lambda at: (at / MANIFEST).write_text(""), "manifest.json is damaged"),
    "manifest no text": (lambda at: (at / MANIFEST).write_bytes(b"\xff\xfe"), "manifest.json is damaged"),
    "manifest of another": (lambda at: swap(at / MANIFEST, older(at) / MANIFEST), "it belongs to step-00000001.1"),
    "renamed": (lambda at: at.rename(at.with_name("step-00000009.1")), "it belongs to step-00000002.1"),
    "emptied": (lambda at: (shutil.rmtree(at), at.mkdir()), "manifest.json is missing"),
}


@pytest.mark.parametrize("harm", DAMAGES)
def test_damage_is_told_and_the_one_before_is_taken(tmp_path: Path, harm: str) -> None:
    damage, says = DAMAGES[harm]
    save(tmp_path, 1, 2)
    damage(tmp_path / "step-00000002.1")
    if harm in ("swapped", "manifest of another"):  # both are damaged
        with pytest.raises(CheckpointError, match=r"no checkpoint can be used: .*step-00000001\.1.*Start over"):
            loaded(tmp_path)
        return
    found, said = loaded(tmp_path)
    assert found.saved.step == 1 and whole(found.tree)["model"]["w"].equal(torch.ones(300, 3))
    assert len(said) == 2 and says in said[0] and "is not used" in said[0] and "\n" not in said[0]
    assert said[1] == "the checkpoint of step 1 is used instead."


def test_every_byte_of_a_checkpoint_counts(tmp_path: Path) -> None:
    save(tmp_path, 1)
    (saved,) = checkpoints_in(tmp_path)
    for path in saved.path.iterdir():
        content = path.read_bytes()
        for at in range(0, len(content), 101):
            flipped = bytearray(content)
            flipped[at] ^= 1 << at % 8
            path.write_bytes(flipped)
            with pytest.raises(CheckpointError, match="no checkpoint can be used"):
                load(tmp_path)
        path.write_bytes(content)
    assert load(tmp_path).saved == saved


def test_of_all_damaged_ones_each_is_named(tmp_path: Path) -> None:
    save(tmp_path, 1, 2)
    for saved in checkpoints_in(tmp_path):
        flip(file(saved.path))
    with pytest.raises(CheckpointError, match=r"no checkpoint can be used: .*step-00000002\.1.*step-00000001\.1"):
        loaded(tmp_path)


def test_what_a_later_version_writes_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("meshwise.records.checkpoints.FORMAT", 3)
    save(tmp_path, 1)
    monkeypatch.undo()
    with pytest.raises(CheckpointError, match="has format 3, but this meshwise reads only 2"):
        loaded(tmp_path)


def test_a_run_that_saved_nothing_is_told_how_to_save(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"there is no checkpoint\. Run with --save-every N, start over"):
        loaded(tmp_path / "checkpoint")
