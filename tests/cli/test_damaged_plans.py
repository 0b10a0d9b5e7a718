"""Machine files, plan files and settings that an editor or a hurried hand has damaged: the commands that read them
answer in one sentence with exit code 2, or with what was asked. Never a traceback, never a hang, never a worker."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from meshwise.launcher import start
from meshwise.spec.errors import UsageError
from meshwise.spec.plan import Plan

PLAN_FIELDS = [field.name for field in fields(Plan)]
OLD = Path(__file__).parents[1] / "old"
MACHINES = sorted((OLD / "machines").glob("*.toml")) + sorted(OLD.glob("machine_*.toml"))
PLANS = sorted((OLD / "plans").glob("*.toml"))
NOT_STARTED = "UsageError: a plan that can be"
Answers = Callable[..., tuple[int, str, str]]
WORD = re.compile(r"(starting .*\n)?\w+Error: ")
FUZZ = settings(suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture
def answers(command: Answers, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Answers:
    """`answers("devices", "m.toml")`: exit code, stdout and stderr. A run whose plan can be is not started."""

    def refuse(*_: object) -> None:
        raise UsageError(NOT_STARTED.removeprefix("UsageError: "))

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(start, "opened", refuse)
    return command


def is_answered(answer: tuple[int, str, str]) -> None:
    code, out, err = answer
    assert code in (0, 2), err
    assert code == 0 or (WORD.match(err) and not out and len(err) < 1200), err
    assert "Traceback" not in err and "\x1b" not in out + err and "\x00" not in out + err


VALUES = r"""'' "\u0000" "\u001b[31m" -1 0 1 2 9223372036854775808 nan inf -1.5 1e400 true [] [[]] {} [1,'x']
    1979-05-27 07:32:00 'none' 'unknown' '3GB' '-3GB/s' '1e999GB' 'cuda:0->cuda:0' 'cuda:0<->cuda:99'"""
ODD = st.sampled_from(VALUES.split()) | st.text(max_size=5).map(lambda text: f"'{text}'")
BROKEN = ("[", "[[device]]", "[part]", "x = 1", "= 2", "\x00", "[a.b.c]", "\ufeff")


@st.composite
def damaged(draw: st.DrawFn, files: list[Path]) -> bytes:
    """A file of which some lines have another value, or are lost, doubled, cut off or glued."""
    lines = draw(st.sampled_from(files)).read_text().splitlines()[: draw(st.integers(1, 60))]
    for _ in range(draw(st.integers(1, 3))):
        at = draw(st.integers(0, len(lines) - 1))
        key, equals, _ = lines[at].partition("=")
        kind = draw(st.sampled_from(["value", "value", "value", "lost", "twice", "cut", "odd"]))
        if kind == "value" and equals:
            lines[at] = f"{key}= {draw(ODD)}"
        elif kind in ("lost", "twice"):
            lines[at : at + 1] = [lines[at]] * (2 if kind == "twice" else 0) or [""]
        elif kind == "cut":
            lines[at] = lines[at][: draw(st.integers(0, len(lines[at])))]
        else:
            lines.insert(at, draw(st.sampled_from(BROKEN)))
    return "\n".join(lines).encode(errors=draw(st.sampled_from(["replace", "surrogatepass"]))) + draw(
        st.binary(max_size=3)
    )


@given(damaged(MACHINES), st.sampled_from(["devices NEW", "devices NEW --json"]))
@FUZZ
def test_a_damaged_machine_file_is_answered(answers: Answers, content: bytes, words: str) -> None:
    Path("new.toml").write_bytes(content)
    is_answered(answers(*words.replace("NEW", "new.toml").split()))


@given(damaged(PLANS), st.sampled_from(["", "2xcpu", "3xcpu"]))
@FUZZ
def test_a_damaged_plan_file_is_answered(answers: Answers, content: bytes, devices: str) -> None:
    Path("plan.toml").write_bytes(content)
    answer = answers("run", "mlp", "--plan", "plan.toml", *(["--devices", devices] if devices else []))
    is_answered(answer)
    assert answer[0] == 2


WORDS = st.sampled_from(
    [*PLAN_FIELDS, "=", ",", " ", "2", "1", "0", "-1", "true", "none", "bf16", "full", "1e9", "9" * 5000]
)
TEXTS = st.text(max_size=12) | st.lists(WORDS, max_size=6).map("".join)
SETTING = st.builds(lambda name, text: f"{name}={text}", st.sampled_from(PLAN_FIELDS), TEXTS) | TEXTS


@given(st.lists(SETTING, min_size=1, max_size=3), st.sampled_from(["--set", "--plan", "--devices"]))
@FUZZ
@example(values=["\x00"], option="--plan")
def test_any_words_for_a_plan_are_answered(answers: Answers, values: list[str], option: str) -> None:
    options = [word for value in values for word in (option, value)]
    answer = answers("run", "mlp", *options, *(() if option == "--devices" else ("--devices", "2xcpu")))
    is_answered(answer)
    assert answer[0] == 2
