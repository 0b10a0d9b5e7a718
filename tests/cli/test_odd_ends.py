"""Programs that end a command from inside, by sys.exit, Ctrl-C or an exception that is no Exception: one sentence, an
exit code that is not 0, and no traceback but the program's own. So are ends without a word: workers/fast_exit.py."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from meshwise import cli
from meshwise.spec.exit_codes import FAILED, INTERRUPTED, USAGE

Ends = Callable[..., tuple[int, list[str]]]
JOB = """
import sys
import torch
from torch import nn
import meshwise as mw

class Odd(BaseException):
    pass

def odd():
    raise Odd("an odd end")

def leaves(code):
    sys.exit(code)

def interrupted():
    raise KeyboardInterrupt

x = torch.randn(64, 4)

def made(first=lambda: None, second=lambda: None):
    first()

    def loss(model, batch):
        second()
        return nn.functional.mse_loss(model(batch[0]), batch[0].sum(1, keepdim=True))

    def predict(model, batch):
        second()
        return model(batch[0])

    return mw.Job(name="ends", model=lambda: nn.Linear(4, 1), loss=loss, data=lambda: (x,), test=lambda: (x,),
        optimizer=lambda params: torch.optim.SGD(params, 0.1), batch_size=8, epochs=1, predict=predict)
"""
IMPORTED = {
    "raise KeyboardInterrupt": (INTERRUPTED, "ends.py:1: stopped by Ctrl-C."),
    "class Odd(BaseException): ...\nraise Odd('an odd end')": (USAGE, "cannot be imported. Line 2: Odd: an odd end"),
    "raise GeneratorExit": (USAGE, "cannot be imported. Line 1: GeneratorExit"),
    "import sys; sys.exit(3)": (USAGE, "exits while it is imported (exit code 3)"),
    "import sys; sys.stderr.close(); sys.stdout = None": (USAGE, "ends.py has no 'job'."),
    "class Odd(Exception):\n    def __str__(self): raise ValueError\nraise Odd": (USAGE, "(its text cannot be made)"),
}
MADE = {
    "made(lambda: leaves(0))": (USAGE, "sys.exit(0) ended the command too early"),
    "made(lambda: leaves(3))": (USAGE, "sys.exit(3) ended the command too early"),
    "made(interrupted)": (INTERRUPTED, "stopped by Ctrl-C"),
    "made(odd)": (FAILED, "the program failed: Odd: an odd end"),
}
LATER = {text.replace("made(", "made(second="): told for text, told in MADE.items()}


@pytest.fixture
def ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Ends:
    """`ends(source, *words)`: the exit code of a command, and the lines beside its output, with ends.py there."""
    monkeypatch.chdir(tmp_path)

    def call(source: str, *words: str) -> tuple[int, list[str]]:
        Path("ends.py").write_text(source)
        sys.modules.pop("ends", None)
        monkeypatch.setattr(sys, "argv", ["meshwise", *words])
        with (
            os.fdopen(os.dup(1), "w") as out,
            os.fdopen(os.dup(2), "w") as beside,
            monkeypatch.context() as own,
            pytest.raises(SystemExit) as end,
        ):
            own.setattr(sys, "stdout", out)  # the program may close them
            own.setattr(sys, "stderr", beside)
            cli.main()
        return int(end.value.code or 0), capfd.readouterr().err.strip().splitlines()

    return call


@pytest.mark.parametrize("source", IMPORTED)
def test_the_end_of_an_import_is_said(source: str, ends: Ends) -> None:
    code, said = ends(source, "run", "ends.py:job")
    assert (code, IMPORTED[source][1] in "".join(said[-2:])) == (IMPORTED[source][0], True), said
    assert "Traceback" not in "".join(said)


@pytest.mark.parametrize("verb", ["run", "plan", "predict"])
@pytest.mark.parametrize("source", MADE)
def test_the_end_of_a_jobs_function_is_said(source: str, verb: str, ends: Ends) -> None:
    code, said = ends(f"{JOB}\ndef job():\n    return {source}", verb, "ends.py:job")
    assert (code, MADE[source][1] in said[-1]) == (MADE[source][0], True), said
    assert ("Traceback" in "".join(said)) is (code == FAILED)


@pytest.mark.parametrize("verb", ["plan", "check"])
@pytest.mark.parametrize("source", LATER)
def test_what_a_job_ends_in_its_rehearsal_or_check_has_no_good_end(source: str, verb: str, ends: Ends) -> None:
    code, said = ends(f"{JOB}\njob = {source}", verb, "ends.py:job")
    assert (code, LATER[source][1] in said[-1]) == (LATER[source][0], True), said


def test_a_prediction_that_the_program_ends_on_every_rank_says_so(processes: None, ends: Ends) -> None:
    code, said = ends(f"{JOB}\njob = made(second=lambda: leaves(0))", "predict", "ends.py:job", "--devices", "1xcpu")
    assert code == FAILED and said[-1].startswith("the program called sys.exit(0) on every rank before its end")


CALLS = {
    "os._exit(3)": "os._exit(3)",
    "os._exit(0)": "os._exit(0)",
}


@pytest.mark.parametrize("how", CALLS)
@pytest.mark.parametrize("verb", ["run", "plan", "check", "predict"])
def test_what_ends_the_process_of_a_command_is_said(
    how: str, verb: str, ends: Ends, capfd: pytest.CaptureFixture[str]
) -> None:
    pid = os.fork()
    if pid == 0:
        with contextlib.suppress(BaseException):
            begins = "import os\nif os.fork() == 0: os._exit(0)"
            ends(f"{begins}\nprint('begun', end=''); {how}", verb, "ends.py:job")
        os._exit(99)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == USAGE
    said = capfd.readouterr()
    assert said.out == "begun\n" and said.err.splitlines()[-1] == (
        f"UsageError: ends.py:3: {CALLS[how]} ended the command too early. "
        "Return from the function that meshwise calls, or raise an exception. Parse the command line under "
        "`if __name__ == '__main__':`."
    )
