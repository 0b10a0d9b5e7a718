"""Which accelerators the workers of a script see: their own alone, or all, as under torchrun."""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path

import pytest

from meshwise.launcher import start as start_file
from meshwise.launcher.script import _script_program
from meshwise.spec.devices import WorkerSlot
from meshwise.training.job.options import RunOptions
from meshwise.workers.launch import Halt, Listeners, _Launcher


@pytest.mark.parametrize(
    ("text", "visible"), [("import torch\n", ["2,5", "2,5"]), ("import meshwise as mw\n", ["2", "5"])]
)
def test_a_script_that_knows_nothing_of_us_sees_all_devices_as_under_torchrun(
    text: str, visible: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "train.py"
    script.write_text(text)
    slots = [WorkerSlot("cuda", index, (), 1) for index in (0, 1)]
    monkeypatch.setattr(start_file, "worker_slots", lambda options: slots)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,5")
    options = RunOptions(job=str(script), out=tmp_path / "runs")
    started = start_file.start(partial(_script_program, script, [], options), options, time.time())
    launcher = _Launcher(tmp_path, tmp_path, Listeners(), None, Halt(), 2, ())
    seen = [
        launcher._environment(rank, rank, 1, slot)["CUDA_VISIBLE_DEVICES"] for rank, slot in enumerate(started.slots)
    ]
    assert seen == visible
