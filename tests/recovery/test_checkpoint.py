"""A saved state comes back whole, or one sentence says why not."""

from __future__ import annotations

import hashlib
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from meshwise.recovery.checkpoint import load_checkpoint, save_checkpoint
from meshwise.spec.errors import CheckpointError


def saved(step: int) -> dict[str, Any]:
    return {"step": step, "epoch": 1, "index": 7, "model": {"w": torch.full((3,), float(step))}}


def newest(folder: Path) -> Path:
    return folder / json.loads((folder / "latest.json").read_text())["file"]


def test_the_newest_state_comes_back(tmp_path: Path) -> None:
    for step in (5, 10):
        save_checkpoint(tmp_path / "checkpoint", saved(step))
    found = load_checkpoint(tmp_path / "checkpoint")
    assert (found["step"], found["epoch"], found["index"]) == (10, 1, 7)
    assert found["model"]["w"].equal(torch.full((3,), 10.0))


def test_only_the_two_newest_are_kept(tmp_path: Path) -> None:
    for step in (1, 2, 9, 10, 100_000_000):  # the last one has a digit more than the names are padded to
        save_checkpoint(tmp_path, saved(step))
    assert {path.name for path in tmp_path.iterdir()} == {"step-00000010.pt", "step-100000000.pt", "latest.json"}


def test_the_state_that_was_just_saved_is_never_removed(tmp_path: Path) -> None:
    for step in (8, 9, 3):  # a run that went back to an earlier state
        save_checkpoint(tmp_path, saved(step))
    assert load_checkpoint(tmp_path)["step"] == 3


def test_a_crash_before_the_end_of_saving_leaves_the_older_state_in_force(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_checkpoint(tmp_path, saved(1))

    def torn(value: Any, file: Any) -> None:
        file.write(b"half of it")
        raise KeyboardInterrupt

    monkeypatch.setattr(torch, "save", torn)
    with pytest.raises(KeyboardInterrupt):
        save_checkpoint(tmp_path, saved(2))
    monkeypatch.undo()
    assert load_checkpoint(tmp_path)["step"] == 1
    assert {path.name for path in tmp_path.iterdir()} == {"step-00000001.pt", "latest.json"}


def damage(folder: Path) -> None:
    content = bytearray(newest(folder).read_bytes())
    content[len(content) // 2] ^= 1
    newest(folder).write_bytes(content)


def truncate(folder: Path) -> None:
    newest(folder).write_bytes(newest(folder).read_bytes()[:-100])


def empty(folder: Path) -> None:
    newest(folder).write_bytes(b"")


def remove(folder: Path) -> None:
    newest(folder).unlink()


def say(text: str) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        (folder / "latest.json").write_text(text)

    return change


def replace_by(content: bytes) -> Callable[[Path], None]:
    """Another file, named with its right digest."""

    def change(folder: Path) -> None:
        facts = {"file": newest(folder).name, "sha256": hashlib.sha256(content).hexdigest()}
        newest(folder).write_bytes(content)
        (folder / "latest.json").write_text(json.dumps(facts))

    return change


def torch_file(value: Any) -> bytes:
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


@pytest.mark.parametrize(
    ("harm", "says"),
    [
        (
            damage,
            "step-00000002.pt: is damaged (its SHA-256 is not the one that was saved). Older states lie beside it.",
        ),
        (truncate, "is damaged"),
        (empty, "is damaged"),
        (remove, "no checkpoint was saved there"),
        (say('{"file": "step-0000'), "latest.json: cannot be read"),
        (say("[]"), "latest.json: cannot be read"),
        (say("null"), "latest.json: cannot be read"),
        (say('{"file": "step-00000002.pt"}'), "latest.json: cannot be read ('sha256')"),
        (say("{}"), "latest.json: cannot be read ('file')"),
        (replace_by(b"no state"), "step-00000002.pt: cannot be read"),
        (replace_by(torch_file(nn.Linear(1, 1))), "step-00000002.pt: cannot be read"),  # code: it is not run
        (replace_by(torch_file([1, 2])), "holds no state of a run"),
    ],
)
def test_a_state_that_cannot_be_read_is_told_in_one_sentence(
    tmp_path: Path, harm: Callable[[Path], None], says: str
) -> None:
    for step in (1, 2):
        save_checkpoint(tmp_path, saved(step))
    harm(tmp_path)
    with pytest.raises(CheckpointError) as caught:
        load_checkpoint(tmp_path)
    assert says in str(caught.value)
    assert str(tmp_path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_run_that_saved_nothing_is_told_how_to_save(tmp_path: Path) -> None:
    with pytest.raises(
        CheckpointError, match=r"no checkpoint was saved there\. Run with --save-every N, or start anew"
    ):
        load_checkpoint(tmp_path / "checkpoint")
