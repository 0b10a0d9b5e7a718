"""Durations as people write them."""

from __future__ import annotations

import pytest

from meshwise.spec.durations import seconds_of
from meshwise.spec.errors import UsageError


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("90", 90),
        ("1.5min", 90),
        ("10 min", 600),
        ("5m", 300),
        ("4h", 14400),
        ("1H", 3600),
        ("1h30min", 5400),
        ("1h 30", 3630),
        ("2d", 172800),
        ("4:00:00", 14400),
        ("1-12:00:00", 129600),
    ],
)
def test_what_people_and_slurm_write(text: str, seconds: float) -> None:
    assert seconds_of(text, "--time-limit") == seconds


@pytest.mark.parametrize("text", ["", "0", "0s", "-5", "soon", "5 parsecs", "h", "1h2h", "4:00", "nan", "1e9"])
def test_anything_else_is_refused_with_the_forms(text: str) -> None:
    with pytest.raises(UsageError, match=r"--time-limit .*10min"):
        seconds_of(text, "--time-limit")
