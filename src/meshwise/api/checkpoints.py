"""List and verify the checkpoints of a run.

This file imports no torch. Tested in tests/cli/test_checkpoints.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from meshwise.records import checkpoints as files
from meshwise.records.checkpoints import CHECKPOINTS
from meshwise.records.folder import newest_run
from meshwise.records.run_list import find_run
from meshwise.spec.errors import CheckpointError

RUNS = Path("runs")


@dataclass(frozen=True)
class CheckpointEntry:
    """One checkpoint in the list of a run's checkpoints.

    saved: when it was saved, in seconds since 1970.
    verified: whether every byte was read and compared with its checksum.
    wrong: the damage that was found. Empty if there is none.
    """

    name: str
    step: int
    epoch: int
    attempt: int
    devices: int
    plan: str
    saved: float
    size: int
    verified: bool
    wrong: str


def run_folder(word: str | None) -> Path:
    """Find the folder of a run.

    word: the folder, the run's name in runs/, or a part of the name. It may also be a folder to which a training loop
        saved checkpoints itself. None is the newest run.
    """
    if word is not None and files.checkpoints_in(Path(word)):
        return Path(word)
    return newest_run(RUNS) if word is None else find_run(RUNS, word)


def checkpoints(folder: Path, *, verify: bool = False) -> list[CheckpointEntry]:
    """List the checkpoints of a run, or of `mw.checkpoint(folder)`, oldest first.

    verify: whether to read every byte and compare it with its checksum.
    """
    found = files.checkpoints_in(folder / CHECKPOINTS) or files.checkpoints_in(folder)
    return [_entry(saved, verify) for saved in found]


def _entry(saved: files.Checkpoint, verify: bool) -> CheckpointEntry:
    try:
        facts, wrong = files.read_manifest(saved).facts, ""
    except CheckpointError as error:
        facts, wrong = {}, str(error).rstrip(".")
    if verify and not wrong:
        wrong = files.verified(saved)
    return CheckpointEntry(
        saved.path.name,
        saved.step,
        epoch=facts.get("epoch", 0) + (facts.get("index", 1) > 0),  # between two epochs it is the one that is over
        attempt=saved.attempt,
        devices=facts.get("world", 0),
        plan=str(facts.get("plan", "")).removeprefix("Plan(").removesuffix(")"),
        saved=facts.get("time", 0.0),
        size=files.size_of(saved.path),
        verified=verify,
        wrong=wrong,
    )
