"""Which exit code a run that was stopped ends with."""

from __future__ import annotations

import signal

import pytest

from meshwise.spec.exit_codes import AGAIN, TIME_LIMIT, code_of_stop, stop_text

SLURM = {"SLURM_JOB_ID": "7"}


@pytest.mark.parametrize(
    ("number", "environment", "code"),
    [
        (signal.SIGINT, {}, 130),
        (signal.SIGINT, SLURM, 130),
        (signal.SIGHUP, {}, 129),
        (signal.SIGTERM, {}, 143),
        (signal.SIGTERM, SLURM, AGAIN),
        (signal.SIGUSR1, {}, AGAIN),
        (signal.SIGUSR2, SLURM, AGAIN),
        (TIME_LIMIT, {}, AGAIN),
    ],
)
def test_a_person_is_told_from_a_scheduler(number: int, environment: dict[str, str], code: int) -> None:
    assert code_of_stop(number, environment) == code


def test_what_stopped_it_is_named() -> None:
    assert [stop_text(n) for n in (signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, TIME_LIMIT)] == [
        "Ctrl-C",
        "a closed terminal",
        "SIGUSR1",
        "its time limit",
    ]
