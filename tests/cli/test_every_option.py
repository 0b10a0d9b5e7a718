"""Every option of every command, as the command line declares it, with values of all kinds: what is refused is refused
in a sentence and with an exit code of the contract, and nothing shows a traceback. What would start is only noted."""

from __future__ import annotations

import random
import shlex
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import typer

from meshwise import cli
from meshwise.spec.exit_codes import MEANINGS

STARTS = {
    "launcher.run": ("start_job",),
    "launcher.script": ("start_script",),
    "checker.check": ("check_options",),
    "planner.plan": ("plan_options",),
    "launcher.predict": ("predict_with",),
    "hardware.bench": ("bench", "bench_hosts"),
    "launcher.doctor": ("examine",),
    "hardware.machines": ("find_machine",),
    "launcher.submit": ("prepare", "send_again"),
}
VALUES = (
    *("", " ", "0", "-1", "1", "2", "1e309", "nan", "-inf", "1_0", "0x10", "9" * 40, "9" * 5000, "3.5", "true", "None"),
    *(
        "naïve",
        "日本",
        "\x1b[31m",
        "a\nb",
        "\t",
        "\ud800",
        "x" * 300,
        "x" * 5000,
        "=",
        "a=",
        "=b",
        "a=b=c",
        ",",
        "a,,b",
    ),
    *("shard=2", "shard=-1", "pipeline=2", "lr=nan", "2xcpu", "0xcpu", "-2xcpu", "2xcuda", "cuda:0,0", "8xH100", "x"),
    *(
        "10min",
        "-3s",
        "1e400s",
        "50GiB",
        "-1B",
        "1 TB",
        "kill:rank=1",
        "kill:rank=-1,step=0",
        "kill:",
        "a:b",
        ":",
        "a:",
    ),
    *(
        "none.toml",
        "folder",
        "/dev/null",
        "/proc/self/mem",
        "..",
        "~",
        "file.txt",
        "none/none",
        "*",
        "--",
        "-h",
        "auto",
    ),
)
CODES = {int(code) for codes in MEANINGS for code in codes.split(", ")} | {3}


begun: list[bool] = []


def begins(*_: Any, **__: Any) -> None:
    """The options hold: what they ask for would begin."""
    begun.append(True)
    raise typer.Exit(0)


def lines(count: int, seed: int) -> Iterator[list[str]]:
    """Command lines; each option of each command is on `count` of them."""
    draw = random.Random(seed)
    for name in cli.COMMANDS:
        command: Any = typer.main.get_command(import_module(cli.COMMANDS[name]).app)
        inner = getattr(command, "commands", {}).items()
        for words, each in [([name], command), *(([name, key], each) for key, each in inner)]:
            for option in [option for option in each.params for _ in range(count)]:
                value, job = draw.choice(VALUES), draw.choice([["mlp"], ["train.py"], [], ["none.py:job"]])
                alone = option.param_type_name == "argument"
                given = [value] if alone else [max(option.opts, key=len), value][: 1 if option.is_flag else 2]
                yield [*words, *given, *job] if job == ["train.py"] else [*words, *job, *given]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("folder").mkdir()
    Path("file.txt").write_text("no plan\n")
    Path("train.py").touch()
    for file, names in STARTS.items():
        for name in names:
            monkeypatch.setattr(import_module(f"meshwise.{file}"), name, begins)


def fault(words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> str:
    """What is wrong with the answer to a command line; nothing where it is well."""
    monkeypatch.setattr(sys, "argv", ["meshwise", *words])
    line = repr(shlex.join(words)[:200])
    try:
        cli.main()
    except SystemExit as end:
        code = end.code or 0
    except BaseException as error:
        return f"{line}: {type(error).__name__}: {error}"[:500]
    shown = capsys.readouterr()
    said = shown.out + shown.err
    wrong = "Traceback" in said or code not in CODES or (code and not shown.err.strip() and not begun)
    begun.clear()
    return f"{line}: exit code {code}, {said[-300:]!r}" if wrong else ""


@pytest.mark.parametrize("count", [pytest.param(1, id="sample"), pytest.param(14, id="whole", marks=pytest.mark.slow)])
def test_every_option_takes_or_refuses_a_value(
    count: int, here: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    every = list(lines(count, seed=count))
    assert count == 1 or len(every) >= 1800
    assert [found for words in every if (found := fault(words, monkeypatch, capsys))] == []
