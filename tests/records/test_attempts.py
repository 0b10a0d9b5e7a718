"""What run.json says of a run's attempts."""

from __future__ import annotations

import math
from typing import Any

import pytest

from meshwise.records.attempts import attempts_of, lost_texts

FAILED = {"status": "failed", "reason": "rank 1 was killed by SIGKILL", "step": 15, "seconds_to_detect": 0.31}


def test_a_sentence_says_why_an_attempt_failed_and_what_it_cost() -> None:
    after = {"status": "finished", "from_step": 12, "steps_lost": 2, "seconds_to_step": 3.4}
    facts = {"sessions": [{"status": "stopped"}, FAILED, after]}
    assert lost_texts(facts) == [
        "Attempt 2: rank 1 was killed by SIGKILL (step 15), noticed after 310 ms; 2 steps were done again, the next "
        "step came 3.4 s later."
    ]
    assert [attempt.from_step for attempt in attempts_of(facts)] == [None, None, 12]


def test_what_is_not_known_is_not_said() -> None:
    assert lost_texts({"sessions": [FAILED | {"step": None, "seconds_to_detect": None}, {"status": "running"}]}) == [
        "Attempt 1: rank 1 was killed by SIGKILL."
    ]
    assert lost_texts({}) == lost_texts({"sessions": [{"status": "finished"}]}) == []


@pytest.mark.parametrize("odd", ["many", -1, True, math.nan, [1], {}, 1e300, 2**80])
@pytest.mark.parametrize("name", ["step", "seconds_to_detect", "from_step", "steps_lost", "seconds_to_step", "reason"])
def test_a_damaged_record_is_read(name: str, odd: Any) -> None:
    assert len(lost_texts({"sessions": [FAILED | {name: odd}, {name: odd}, odd]})) in (1, 2)
