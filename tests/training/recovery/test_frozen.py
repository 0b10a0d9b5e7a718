"""What a rank of an earlier attempt writes that stood still is read by nobody (the whole: bench/frozen_ranks.py)."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.training.recovery.frozen_writers import KINDS, lines_of, woken


@pytest.mark.parametrize("kind", KINDS)
def test_a_rank_that_wakes_in_a_later_attempt_changes_nothing_that_is_read(
    kind: str, processes: None, tmp_path: Path
) -> None:
    lines = lines_of(tmp_path / "lines", kind)
    for at in {1, lines // 4, lines // 2, lines - 2}:
        assert woken(tmp_path / str(at), kind, max(at, 1)) == [], f"before line {at} of {lines}"
