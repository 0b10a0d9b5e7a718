"""Injected faults happen in their phase of their step, once, and are written down."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from meshwise.records.files import read_lines
from meshwise.reports.recorder import Recorder
from meshwise.reports.spans import KIND
from meshwise.spec.faults import PHASES, parse_fault
from meshwise.training.engine.phases import Phases
from meshwise.training.recording import faults


@pytest.fixture
def recorder(tmp_path: Path) -> Iterator[Any]:
    """`recorder(fault)`: rank 1's, with that fault."""

    def of(*texts: str) -> Recorder:
        faults.arm([parse_fault(text) for text in texts], 1, tmp_path)
        made = Recorder()
        faults.watch(made)
        return made

    yield of
    faults.arm([], 1, None)


def test_without_faults_nothing_is_another_one(recorder: Any) -> None:
    assert type(recorder("kill:rank=0,step=1")) is Recorder


def test_every_phase_is_one_that_spans_have() -> None:
    assert set(PHASES) <= KIND.keys()


def test_a_fault_happens_once_as_its_phase_begins(recorder: Any, tmp_path: Path) -> None:
    rank = recorder("raise:rank=1,step=2,phase=backward")
    for step in (1, 2, 2, 3):
        rank.begin_step(step)
        with rank.span("forward"):
            pass
        told = bool(read_lines(tmp_path / "faults.jsonl"))
        if step == 2 and not told:
            with (
                pytest.raises(RuntimeError, match="--fault raise:rank=1,step=2,phase=backward"),
                rank.span("backward"),
            ):
                pytest.fail("the phase has begun")
        else:
            with rank.span("backward"):
                pass
    (line,) = read_lines(tmp_path / "faults.jsonl")
    assert line["fault"] == "raise:rank=1,step=2,phase=backward" and line["attempt"] == 1 and line["time"] > 0


def test_a_fault_happens_too_where_the_folder_of_the_run_is_gone(
    recorder: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("meshwise.records.files._places", {tmp_path.absolute(): 0})
    rank = recorder("raise:rank=1,step=2,phase=backward")
    rank.begin_step(2)
    with pytest.raises(RuntimeError), rank.span("backward"):
        pytest.fail("the phase has begun")


def test_a_collective_and_the_phases_of_a_script_have_faults_too(
    recorder: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    rank = recorder(*(f"raise:rank=1,step=1,phase={phase}" for phase in ("data", "forward", "communication")))
    monkeypatch.setattr("meshwise.training.engine.phases.current", lambda: rank)
    phases = Phases()
    with pytest.raises(RuntimeError, match="phase=data"):
        phases.batch_asked(None)
    with pytest.raises(RuntimeError, match="phase=forward"):
        phases.batch_given(None, None)
    with pytest.raises(RuntimeError, match="phase=communication"):
        rank.arrive()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_a_flipped_bit_changes_one_value_which_stays_finite(dtype: torch.dtype, recorder: Any) -> None:
    rank = recorder("bitflip:rank=1,step=1", "nan:rank=1,step=2")
    held = torch.full((3, 2), 1.5, dtype=dtype).t()
    rank.parameters = lambda: {"weight": held}
    rank.begin_step(1)
    with rank.span("forward"):
        pass
    assert (held != 1.5).sum() == 1 and held.isfinite().all()
    rank.begin_step(2)
    with rank.span("forward"):
        pass
    assert held.isnan().sum() == 1


def test_what_slows_a_phase_goes_on(recorder: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    monkeypatch.setattr("meshwise.training.recording.faults.time.sleep", slept.append)
    rank = recorder("slow 20ms:rank=1,step=2")
    for step in (1, 2, 3):
        rank.begin_step(step)
        for _ in range(2):  # microbatches
            with rank.span("forward"):
                pass
    assert slept == [0.02] * 2


def test_out_of_memory_is_torchs(recorder: Any) -> None:
    rank = recorder("oom:rank=1,step=1")
    rank.begin_step(1)
    with pytest.raises(torch.OutOfMemoryError, match="--fault oom"), rank.span("forward"):
        pass
