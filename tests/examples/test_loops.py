"""The programs of docs/loops.md: on several devices each is what it is on one, to 1e-9 in float64."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from meshwise.training.process.session import end_sessions

FOLDER = Path(__file__).parents[2] / "examples" / "loops"
PAGE = Path(__file__).parents[2] / "docs" / "loops.md"
NAMES = sorted(path.stem for path in FOLDER.glob("*.py"))


def in_float64(source: str) -> Any:
    """What the program's `main` gives."""
    torch.set_default_dtype(torch.float64)
    try:
        names: dict[str, Any] = {"__name__": "program"}
        exec(compile(source, "program.py", "exec"), names)  # workers find no module of it
        numbers, state = names["main"]()
        return numbers, {name: value.clone() for name, value in state.items()}
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("size", [2, pytest.param(3, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", NAMES)
def test_a_loop_is_that_of_one_device(name: str, size: int, pool: Any) -> None:
    source = (FOLDER / f"{name}.py").read_text()
    end_sessions()
    want = in_float64(source)
    for got in pool(size).run(in_float64, source):
        torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-9)


def test_each_loop_stands_in_the_table() -> None:
    table = PAGE.read_text()
    assert all(f"examples/loops/{name}.py" in table for name in NAMES)
