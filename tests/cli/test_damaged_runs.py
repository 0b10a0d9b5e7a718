"""Run folders that a disk, an editor or another program has damaged: reports and lists answer, in one sentence or with
what can still be read. Never a traceback, never a hang."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

WHOLE = Path(__file__).parents[1] / "old/runs/finished"
FILES = ("run.json", "metrics.jsonl", "spans/rank0.jsonl", "spans/rank1.jsonl", "summary.json", "plan.toml")
COMMANDS = ("report RUN", "report RUN --json", "report RUN WHOLE", "runs", "report RUN --steps 1:2")
Answers = Callable[..., tuple[int, str, str]]


@pytest.fixture
def answers(command: Answers, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Answers:
    """`answers("report RUN")`: exit code, stdout and stderr, in a folder with a run to damage and a whole one."""
    monkeypatch.chdir(tmp_path)
    named = {"RUN": "runs/run", "WHOLE": str(WHOLE)}
    return lambda words: command(*(named.get(word, word) for word in words.split()))


def fresh() -> Path:
    """A copy of a whole run, in this folder."""
    run = Path("runs/run")
    shutil.rmtree(run, ignore_errors=True)
    shutil.copytree(WHOLE, run, ignore=shutil.ignore_patterns("checkpoint", "weights*"))
    return run


def is_answered(answers: Answers, words: str) -> None:
    """It ends well, or is refused in one sentence."""
    code, _, err = answers(words)
    assert code in (0, 2), err
    assert code == 0 or words != "runs"  # a list goes on past a damaged run
    assert code == 0 or (err.startswith("UsageError: ") and "Traceback" not in err and len(err) < 1000), err


def places(value: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Where in a JSON value there is something to replace."""
    yield at
    for key, each in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        yield from places(each, (*at, key))


def replaced(value: Any, at: tuple[Any, ...], new: Any) -> Any:
    if not at:
        return new
    copy = dict(value) if isinstance(value, dict) else list(value)
    copy[at[0]] = replaced(copy[at[0]], at[1:], new)
    return copy


ODD = st.sampled_from(
    [
        None,
        True,
        -1,
        0,
        2,
        10**9,
        10**18,
        10**400,
        float("nan"),
        float("inf"),
        -1.5,
        "",
        "x",
        "\x00",
        "\x1b[31mred",
        "\ud800",
        "x" * 5000,
        [],
        {},
        [[]],
        [None],
        {"": None},
        [1, "x", {}],
    ]
)


@given(st.sampled_from(FILES[:4]), ODD, st.data())
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_value_of_another_type_is_answered(answers: Answers, name: str, odd: Any, data: st.DataObject) -> None:
    path = fresh() / name
    text = path.read_text()
    records = [json.loads(text)] if name.endswith(".json") else [json.loads(line) for line in text.splitlines()]
    which = data.draw(st.integers(0, len(records) - 1))
    at = data.draw(st.sampled_from([*places(records[which])]))
    records[which] = replaced(records[which], at, odd)
    path.write_text("\n".join(map(json.dumps, records)))
    is_answered(answers, data.draw(st.sampled_from(COMMANDS)))


DAMAGED: dict[str, Callable[[Path], object]] = {
    "empty": lambda path: path.write_bytes(b""),
    "zeros": lambda path: path.write_bytes(bytes(100)),
    "not UTF-8": lambda path: path.write_bytes(b'{"job": "\xff\xfe"}\n'),
    "deep": lambda path: path.write_text("[" * 100_000),
    "deep value": lambda path: path.write_text('{"job": ' + "[" * 100_000),
    "digits": lambda path: path.write_text('{"world": ' + "9" * 10_000 + "}"),
    "folder": lambda path: path.mkdir(),
    "pipe": os.mkfifo,
    "lost link": lambda path: path.symlink_to("nowhere"),
    "loop": lambda path: path.symlink_to(path.name),
}


QUICK = ("run.json", "metrics.jsonl", "spans/rank0.jsonl", "best.safetensors")


@pytest.mark.parametrize("damage", DAMAGED)
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[] if name in QUICK else pytest.mark.slow) for name in [*FILES, *QUICK[3:], "spans"]],
)
def test_a_damaged_file_is_answered(name: str, damage: str, answers: Answers) -> None:
    path = fresh() / name
    if path.is_dir():
        shutil.rmtree(path)
    path.unlink(missing_ok=True)
    DAMAGED[damage](path)
    for words in ("report RUN WHOLE", "runs"):
        is_answered(answers, words)


def test_a_damaged_run_does_not_hide_the_newest(answers: Answers, tmp_path: Path) -> None:
    (tmp_path / "runs").mkdir()
    shutil.copytree(WHOLE, "runs/whole", ignore=shutil.ignore_patterns("checkpoint"))
    (tmp_path / "runs/damaged").mkdir()
    (tmp_path / "runs/damaged/run.json").write_text("{")
    code, out, err = answers("report")
    assert code == 0 and "old finished" in out, err
