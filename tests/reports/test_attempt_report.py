"""The attempts of a run: gaps, queues, what was done again."""

from __future__ import annotations

from typing import Any

from meshwise.reports.analyse import attempt_reports

SENT = 1_000_000.0


def session(began: float, ended: float, status: str, start: int | None = None, **more: Any) -> dict[str, Any]:
    launched = {} if start is None else {"launcher": "Slurm", "scheduler_job": "7", "start": start}
    return {"began": SENT + began, "ended": SENT + ended, "status": status, "world": 8, **launched, **more}


FACTS: dict[str, Any] = {
    "submission": {"jobs": {"7": SENT}},
    "sessions": [
        session(60, 100, "failed", 1, from_step=0, reason="rank 1 was killed by SIGKILL"),
        session(102, 200, "stopped", 1, from_step=40, steps_lost=2, reason="its time limit after step 90"),
        session(230, 300, "finished", 2, from_step=90, world=4),
    ],
}


def test_a_restart_inside_a_start_has_not_waited_in_the_queue() -> None:
    first, second, third = attempt_reports(FACTS)
    assert [(one.before, one.queued) for one in (first, second, third)] == [(60, True), (2, False), (30, True)]
    assert [one.launched for one in (first, third)] == ["Slurm job 7, start 1", "Slurm job 7, start 2"]
    assert [(one.devices, one.from_step, one.steps_lost, one.seconds) for one in (second, third)] == [
        (8, 40, 2, 98),
        (4, 90, 0, 70),
    ]
    assert [one.ended for one in (first, second, third)] == [
        "failed: rank 1 was killed by SIGKILL",
        "stopped by its time limit after step 90",
        "finished",
    ]


def test_where_an_attempt_of_a_loop_began_is_not_known_and_not_said() -> None:
    (one,) = attempt_reports({"sessions": [session(60, 100, "failed", 1)]})
    assert (one.from_step, one.steps_lost) == (None, None)


def test_a_run_that_was_sent_again_later_has_waited_since_then() -> None:
    later = session(90_060, 90_100, "finished", 1) | {"scheduler_job": "9"}
    facts = {
        "submission": {"jobs": {"7": SENT, "9": SENT + 90_000}},
        "sessions": [session(60, 100, "stopped", 1), later],
    }
    assert attempt_reports(facts)[1].before == 60


def test_a_record_that_says_little_is_shown_all_the_same() -> None:
    (one,) = attempt_reports({"sessions": [{"began": SENT}]})
    assert (one.number, one.seconds, one.before, one.launched, one.devices) == (1, 0, 0, "", 0)
    assert attempt_reports({}) == []
