"""A loss that is not finite: who had it first, how the program ends, and what a file says of it."""

from __future__ import annotations

import math
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import meshwise as mw
from meshwise.spec.errors import LossError
from meshwise.training.process.session import default_engine, program_ends

FIRST = "step 2: the loss{} is nan (samples {}). The run continues, but its parameters are lost unless "
COUNTED = "1 of 5 losses were not finite, the first in step 2"


def program(bad: int | None, step: Callable[[Any, Any], bool] = lambda loss, scaler: True, scaled: bool = False) -> Any:
    """Trains on 20 samples in batches of four; sample `bad` is NaN. step: whether the optimizer steps."""
    torch.manual_seed(0)
    default_engine().phases.steps = 0
    x = torch.randn(20, 2)
    if bad is not None:
        x[bad] = math.nan
    model: Any = nn.Linear(2, 1)
    scaler = torch.amp.GradScaler("cpu", enabled=scaled)
    optimizer: Any = torch.optim.SGD(model.parameters(), 0.01)
    loader: Any = DataLoader(TensorDataset(x), batch_size=4)
    model, optimizer, loader = mw.distribute(model, optimizer, loader, view="rank")
    for (rows,) in loader:
        loss = mw.backward(scaler.scale(model(rows).square().mean()))
        if step(loss, scaler):
            scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    return model


def ends() -> tuple[str, list[str]]:
    """How the program ends: the error's text, and what was said."""
    try:
        program_ends()
    except LossError as error:
        return str(error), default_engine().notes
    return "", default_engine().notes


def only_if_finite(loss: Any, scaler: Any) -> bool:
    return bool(torch.isfinite(loss))


def spoiled() -> tuple[str, list[str]]:
    kept = program(5)
    assert not torch.isfinite(kept.weight).any()
    return ends()


def dropped() -> tuple[str, list[str]]:
    kept = program(5, only_if_finite)
    assert torch.isfinite(kept.weight).all()
    return ends()


def skipped_by_the_scaler() -> tuple[str, list[str]]:
    kept = program(5, scaled=True)
    assert torch.isfinite(kept.weight).all()
    return ends()


def dropped_at_last() -> tuple[str, list[str]]:
    kept = program(18, only_if_finite)
    assert torch.isfinite(kept.weight).all()
    return ends()


def right() -> tuple[str, list[str]]:
    kept = program(None)
    assert torch.isfinite(kept.weight).all()
    return ends()


def check(case: Callable[[], tuple[str, list[str]]], one: str, pool: Any, said: str, error: str) -> None:
    """On one device, and on two, where sample 5 is one of rank 0's and 18 of rank 1's."""
    for rank, (raised, notes) in enumerate([case(), *pool(2).run(case)]):
        assert raised == error
        lines = [said.format("", one)] if rank == 0 else [said.format(" of rank 0", "4, 5")]
        assert [note.startswith(line) for note, line in zip(notes, lines, strict=False)] == [True]


def test_the_first_is_said_with_its_rank_step_and_samples_and_the_program_fails(pool: Any) -> None:
    error = "the program has ended, and its last loss is not finite. 4 of 5 losses were not finite, the first in"
    check(spoiled, "4, 5, 6, 7", pool, FIRST, f"{error} step 2")


@pytest.mark.parametrize("case", [dropped, skipped_by_the_scaler])
def test_a_program_that_leaves_the_step_out_goes_on_and_ends_well(case: Any, pool: Any) -> None:
    check(case, "4, 5, 6, 7", pool, FIRST, "")
    assert f"{COUNTED}; the last one is finite." in default_engine().notes


def test_one_whose_last_loss_is_not_finite_fails(pool: Any) -> None:
    for raised, _ in [dropped_at_last(), *pool(2).run(dropped_at_last)]:
        assert raised.startswith(
            "the program has ended, and its last loss is not finite. 1 of 5 losses were not finite"
        )


def test_of_a_finite_program_nothing_is_said(pool: Any) -> None:
    assert [right(), *pool(2).run(right)] == [("", [])] * 3


def test_a_run_of_such_a_script_ends_with_1(processes: None, tmp_path: Path) -> None:
    script = """
        import torch, meshwise as mw
        def main():
            model, loader = mw.distribute(
                torch.nn.Linear(2, 1), torch.utils.data.DataLoader([torch.ones(2)] * 2, 2), view="rank"
            )
            for x in loader:
                mw.backward(model(x).mean() * float("nan"))
        main()
    """
    (tmp_path / "train.py").write_text(textwrap.dedent(script))
    command = [sys.executable, "-m", "meshwise", "run", "--devices", "1xcpu", "train.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1
    assert "LossError: the program has ended, and its last loss is not finite" in done.stderr
