"""The command line as a whole: its commands, its exit codes, and errors as one sentence."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from meshwise import cli
from meshwise.spec.errors import MeshwiseError, UsageError

FAILURES = Path(__file__).parents[1] / "docs" / "failures.md"


def ended(words: str, monkeypatch: pytest.MonkeyPatch) -> object:
    monkeypatch.setattr(sys, "argv", ["meshwise", *words.split()])
    with pytest.raises(SystemExit) as end:
        cli.main()
    return end.value.code


@pytest.mark.parametrize("command", cli.COMMANDS)
def test_every_command_has_help(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert not ended(f"{command} --help", monkeypatch)
    assert re.search(rf"Usage: .*{command} \[OPTIONS\]", capsys.readouterr().out)


@pytest.mark.parametrize("columns", [40, 66, 80])
@pytest.mark.parametrize("command", cli.COMMANDS)
def test_help_keeps_the_names_of_options_whole(
    command: str, columns: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    ended(f"{command} --help", monkeypatch)
    assert "…" not in capsys.readouterr().out.replace("runs/…", "")


def test_an_unknown_command_is_answered_with_the_nearest(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert ended("runn", monkeypatch) == 2
    assert capsys.readouterr().err == (
        f"UsageError: meshwise runn: no such command. Did you mean 'run'? Use one of {', '.join(cli.COMMANDS)}.\n"
    )


def test_no_command_shows_the_help_and_nothing_else(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert ended("", monkeypatch) == 2
    shown = capsys.readouterr()
    assert "Usage:" in shown.out + shown.err and "UsageError" not in shown.err


def test_the_page_of_failures_has_the_exit_codes_of_the_help(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    table = FAILURES.read_text().split("<!-- EXIT_CODES -->")[1].split("<!-- end -->")[0]
    rows = re.findall(r"^\| ([\d, ]+) \| (.*) \|$", table, re.M)
    assert rows == list(cli.EXIT_CODES.items())
    assert {MeshwiseError.exit_code, UsageError.exit_code} <= {int(code) for code in list(cli.EXIT_CODES)[:4]}
    assert not ended("--help", monkeypatch)
    shown = " ".join(capsys.readouterr().out.split())
    for code, meaning in cli.EXIT_CODES.items():
        assert f"{code} {meaning}" in shown
