"""docs/from-accelerate.md: both programs run and end with the same weights, ours on two devices too; its table quotes
them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from meshwise.training.process.session import end_sessions
from tests.run_programs import assert_alike, columns, quoted, run

THEIRS, OURS, ROWS = columns("from-accelerate.md", "| accelerate | meshwise | what changes |")


def test_both_columns_train_the_same_model(pool: Any, tmp_path: Path) -> None:
    pytest.importorskip("accelerate", reason="accelerate is not installed: pip install accelerate")
    states = __import__("accelerate.state").state
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ACCELERATE_USE_CPU", "true")
        theirs = run(THEIRS, tmp_path)
    states.AcceleratorState._reset_state(reset_partial_state=True)
    end_sessions()
    for ours in (run(OURS, tmp_path), *pool(2).run(run, OURS, tmp_path)):
        assert_alike(ours, theirs)


def test_the_table_quotes_the_programs() -> None:
    assert len(ROWS) == 11 and quoted(ROWS, THEIRS, OURS)
