"""Who is to blame: a victim is never shown as the cause, and the user sees their own frames."""

from __future__ import annotations

import re
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import meshwise as mw
from meshwise.reports.analyse import report_of
from meshwise.reports.spans import Timeline
from meshwise.spec.errors import MeshwiseError, UsageError, WorkerFailed
from meshwise.spec.user_code import user_place
from meshwise.torch_compat.tree import map_tensors
from meshwise.workers.failure import (
    Failure,
    by_error,
    by_exit,
    by_exit_status,
    culprit,
    is_communication_error,
    sentence,
    user_traceback,
)
from meshwise.workers.hints import add_hint

LOST = RuntimeError("[../gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:52114")

kinds = st.sampled_from(["raised", "killed", "left", "victim"])
failures = st.lists(
    st.builds(Failure, st.integers(0, 7), kinds, st.just("it broke"), time=st.floats(0, 100)), min_size=1, max_size=8
)


def caught(function: Callable[[], object]) -> BaseException:
    try:
        function()
    except BaseException as error:
        return error
    raise AssertionError("it raised nothing")


@pytest.mark.parametrize(
    ("code", "of_the_run", "message"),
    [(3, 3, "left with exit code 3"), (256, 1, "left with exit code 256"), (-5, 1, "left"), ("bye", 1, "bye")],
)
def test_an_exit_code_of_a_program_never_says_that_all_is_well(code: int | str, of_the_run: int, message: str) -> None:
    failed = by_exit(0, SystemExit(code))
    assert failed.exit_code == of_the_run and failed.message.startswith(message)
    left: Any = caught(lambda: sys.exit(code))
    where = "" if message == "bye" else r"\S*test_failure.py:\d+: "
    assert re.match(where + message, by_exit(0, left).message)


def test_an_error_without_a_text_and_one_with_an_exit_code_of_its_own_are_told() -> None:
    class Odd(RuntimeError):
        exit_code = 0

        def __str__(self) -> str:
            raise ValueError

    error = Odd()
    add_hint(error)
    failed = by_error(0, error)
    assert (failed.message, failed.exit_code, failed.kind) == ("Odd: (its text cannot be made)", 1, "raised")
    assert by_error(0, KeyboardInterrupt()).message == "KeyboardInterrupt"


@given(failures)
def test_a_victim_is_never_the_culprit_while_anything_else_failed(found: list[Failure]) -> None:
    chosen = culprit(found)
    assert chosen in found
    causes = [f for f in found if f.kind in ("raised", "killed")] or [f for f in found if f.kind == "left"] or found
    assert chosen.kind in {f.kind for f in causes}
    assert chosen.time == min(f.time for f in causes)


def test_what_was_asked_wrongly_names_the_users_line_once() -> None:
    def refuse(said: str) -> None:
        raise UsageError(said)

    line = refuse.__code__.co_firstlineno + 1
    found = by_error(1, caught(lambda: refuse("no such thing. Use another.")))
    assert found.plain and found.message.endswith(f"test_failure.py:{line}: no such thing. Use another.")
    assert by_error(0, caught(lambda: refuse(f"{user_place()}: no."))).message.count("test_failure.py") == 1
    from_inside = by_error(0, caught(lambda: mw.backward(torch.ones(2, requires_grad=True), reduction="total")))  # type: ignore[arg-type]
    line = test_what_was_asked_wrongly_names_the_users_line_once.__code__.co_firstlineno + 8
    assert f"test_failure.py:{line}: reduction='total' is not known" in from_inside.message


def test_an_early_victim_does_not_hide_a_late_culprit() -> None:
    victim = Failure(0, "victim", "lost", time=1.0)
    for kind in ("raised", "killed", "left"):
        assert culprit([victim, Failure(1, kind, "cause", time=9.0)]).rank == 1


def test_a_worker_that_left_does_not_hide_one_that_raised() -> None:
    assert culprit([Failure(0, "left", "left", time=1.0), Failure(1, "raised", "boom", time=2.0)]).rank == 1


@pytest.mark.parametrize(
    ("status", "kind", "says"),
    [
        (-signal.SIGKILL, "killed", "was killed by SIGKILL (often the system's out-of-memory killer)"),
        (-signal.SIGSEGV, "killed", "was killed by SIGSEGV"),
        (-40, "killed", "was killed by signal 40"),  # a real-time signal: it has no name of its own
        (-99, "killed", "was killed by signal 99"),
        (0, "left", "left with exit code 0 without saying that its work is done"),
        (7, "left", "left with exit code 7 without saying that its work is done"),
    ],
)
def test_a_worker_that_ended_without_a_word_is_told_by_its_exit_status(status: int, kind: str, says: str) -> None:
    found = by_exit_status(2, status)
    assert found == Failure(2, kind, says, time=found.time) and time.time() - 60 < found.time <= time.time()


def raise_from(cause: BaseException) -> None:
    raise ValueError("the epoch failed") from cause


def raise_while_handling(cause: BaseException) -> None:
    try:
        raise cause
    except type(cause):
        raise KeyError("log")  # noqa: B904


@pytest.mark.parametrize(
    ("error", "lost"),
    [
        (LOST, True),
        (RuntimeError("NCCL error: remote process exited"), True),
        (dist.DistBackendError("unhandled"), True),
        (dist.DistStoreError("timed out"), True),
        (caught(lambda: raise_from(LOST)), True),
        (caught(lambda: raise_while_handling(LOST)), True),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False),
        (ValueError("gloo is a word that a user may write"), False),
        (caught(lambda: raise_from(KeyError("x"))), False),
    ],
)
def test_what_comes_out_of_a_collective_is_told_from_a_mistake(error: BaseException, lost: bool) -> None:
    assert is_communication_error(error) is lost
    assert by_error(0, error).kind == ("victim" if lost else "raised")


def test_our_frames_around_the_users_are_left_out() -> None:
    def the_users_mistake(tensor: Tensor) -> Tensor:
        raise ValueError("mine")

    error = caught(lambda: map_tensors(the_users_mistake, {"x": torch.ones(1)}))
    text = user_traceback(error)
    assert text.startswith("Traceback (most recent call last):\n")
    assert "in the_users_mistake" in text and 'raise ValueError("mine")' in text
    assert "meshwise/torch_compat/tree.py" not in text


def test_a_traceback_of_our_frames_alone_is_whole() -> None:
    error = caught(lambda: map_tensors(1, torch.ones(1)))  # type: ignore[arg-type]
    while error.__traceback__ is not None and error.__traceback__.tb_frame.f_code.co_filename == __file__:
        error = error.with_traceback(error.__traceback__.tb_next)
    assert "meshwise/torch_compat/tree.py" in user_traceback(error)


def test_the_report_of_a_users_error_has_its_traceback_and_notes() -> None:
    def step() -> None:
        error = ValueError("bad label")
        error.add_note("rank 1, step 3, phase forward")
        raise error

    report = by_error(3, caught(step))
    assert (report.rank, report.message) == (3, "ValueError: bad label")
    assert "in step" in report.traceback
    assert report.notes == ["rank 1, step 3, phase forward"]
    assert (report.plain, report.kind, report.exit_code) == (False, "raised", 1)


@pytest.mark.parametrize("error", [UsageError("write 2xcpu"), WorkerFailed("stopped", exit_code=2)])
def test_an_error_of_ours_is_a_plain_sentence_with_its_exit_code(error: MeshwiseError) -> None:
    try:
        raise error from LOST
    except MeshwiseError as raised:
        report = by_error(0, raised)
    assert (report.plain, report.kind, report.traceback, report.exit_code) == (True, "raised", "", 2)


def test_the_sentence_names_the_rank_what_happened_and_the_traceback_once() -> None:
    trace = 'Traceback (most recent call last):\n  File "train.py", line 3, in loss\n'
    raised = Failure(
        1, "raised", "ValueError: bad label", trace, notes=("rank 1, step 3, phase forward", "Use 1 to 10.")
    )
    assert sentence(raised, 4) == (
        'Traceback (most recent call last):\n  File "train.py", line 3, in loss\n'
        "rank 1, step 3, phase forward\n"
        "rank 1 of 4 failed: ValueError: bad label\n"
        "Use 1 to 10."
    )
    assert sentence(replace(raised, kind="loader", message="lost a loader worker", traceback=""), 4) == (
        "rank 1, step 3, phase forward\nrank 1 of 4 lost a loader worker. Use 1 to 10."
    )
    assert sentence(replace(raised, plain=True), 4) == "ValueError: bad label"
    assert sentence(by_exit_status(2, -9), 4).startswith("rank 2 of 4 was killed by SIGKILL")
    assert sentence(Failure(0, "victim", "lost"), 4) == "rank 0 of 4 lost the connection to another rank: lost"


def test_an_errors_text_is_cut_and_printable() -> None:
    failure = by_error(0, ValueError("\x1b[31m" + "x" * 9000))
    assert failure.message.startswith("ValueError: xxx") and failure.message.endswith("(7,000 more characters)")


def test_ranks_that_failed_alike_are_told_as_one() -> None:
    first, *others = (Failure(rank, "raised", "ValueError: bad label") for rank in range(3))
    assert sentence(first, 3, [first, *others]) == "all 3 ranks failed: ValueError: bad label"
    others[0] = replace(others[0], message="ValueError: another label")
    assert sentence(first, 3, [first, *others]) == "rank 0 of 3 failed: ValueError: bad label"
    assert sentence(first, 4, [first, *others]).startswith("rank 0 of 4 failed")
    assert sentence(first, 1) == "rank 0 of 1 failed: ValueError: bad label"


def test_the_line_behind_the_frames_is_what_a_report_says_of_a_failed_run() -> None:
    frames = "Traceback (most recent call last):\n  File 'a.py'\n    f()\n"
    raised = Failure(1, "raised", "ValueError: bad label", frames)
    timeline = Timeline(facts={"status": "failed", "error": sentence(raised, 2)})
    says = "The run failed: rank 1 of 2 failed: ValueError: bad label. Until then"
    assert report_of(timeline, "run").verdict.startswith(says)


def test_ranks_that_all_live_and_lost_each_other_had_a_bad_link() -> None:
    closed = "RuntimeError: [pair.cc:534] Connection closed by peer [127.0.0.1]:1234"
    both = [Failure(rank, "victim", closed, time=rank) for rank in (0, 1)]
    found = culprit(both, 2)
    assert found.kind == "link" and found.of_machine and "Check the network between them" in sentence(found, 2)
    assert culprit(both, 3).kind == "victim"  # the third may be the culprit
    mistake = [Failure(rank, "victim", "RuntimeError: ProcessGroupGloo: invalid tensor") for rank in (0, 1)]
    assert culprit(mistake, 2).kind == "victim"
