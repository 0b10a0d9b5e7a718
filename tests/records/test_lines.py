"""JSON lines that outlive a crash in the middle of a line."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwise.records.files import append_lines, kept_lines, read_lines


def test_records_come_back_in_their_order_over_several_appends(tmp_path: Path) -> None:
    path = tmp_path / "spans" / "rank0.jsonl"
    append_lines(path, [{"step": 1}, {"step": 2}])
    append_lines(path, [])
    append_lines(path, [{"step": 3, "name": "zwei\nZeilen"}])
    assert read_lines(path) == [{"step": 1}, {"step": 2}, {"step": 3, "name": "zwei\nZeilen"}]
    assert len(path.read_text().splitlines()) == 3


@given(st.text(max_size=20), st.integers(0, 60))
def test_a_half_line_from_a_crash_does_not_swallow_the_next_record(
    tmp_path_factory: pytest.TempPathFactory, text: str, cut: int
) -> None:
    path = tmp_path_factory.mktemp("crash") / "metrics.jsonl"
    append_lines(path, [{"step": 1}])
    whole = json.dumps({"step": 2, "name": text}) + "\n"
    half = whole[: min(cut, len(whole) - 2)]  # at the least the closing brace is lost
    with path.open("a") as file:
        file.write(half)
    append_lines(path, [{"step": 3}])
    assert read_lines(path) == [{"step": 1}, {"step": 3}]


def test_a_record_that_lost_only_its_line_end_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}')
    append_lines(path, [{"step": 2}])
    assert read_lines(path) == [{"step": 1}, {"step": 2}]


def test_bytes_that_are_no_text_cost_their_own_line_alone(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1}\n\xff\xfe\x00\n{"step": 2}\n')
    assert read_lines(path) == [{"step": 1}, {"step": 2}]


def test_a_file_that_is_not_there_has_no_records(tmp_path: Path) -> None:
    assert read_lines(tmp_path / "none.jsonl") == []
    assert kept_lines(tmp_path / "none.jsonl", lambda record: True) == b""
    assert list(tmp_path.iterdir()) == []


def test_keeping_drops_the_unwanted_and_what_was_cut_off(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    append_lines(path, [{"step": step} for step in (1, 2, 3)])
    with path.open("a") as file:
        file.write('{"step": 1, "lo')
    assert kept_lines(path, lambda record: record["step"] <= 2) == b'{"step": 1}\n{"step": 2}\n'
