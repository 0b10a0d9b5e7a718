"""Tests that `make test` leaves to `make suite` are there: tests/night.txt names no test of the past."""

from pathlib import Path

from tests.conftest import NIGHT


def test_each_name_is_a_test() -> None:
    root = Path(__file__).parents[1]
    parts = [name.partition("[")[0].split("::") for name in NIGHT]
    assert len(parts) > 100
    texts = {file: (root / file).read_text(encoding="utf-8") for file in {file for file, _ in parts}}
    assert [f"{file}::{test}" for file, test in parts if f"def {test}(" not in texts[file]] == []
