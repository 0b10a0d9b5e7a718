"""The command line as a whole: its commands, its exit codes, and errors as one sentence."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from meshwise import cli
from meshwise.spec.errors import MeshwiseError, UsageError

FAILURES = Path(__file__).parents[1] / "docs" / "failures.md"


Command = Callable[..., tuple[int, str, str]]


@pytest.mark.parametrize("columns", [40, 66, 80])
@pytest.mark.parametrize("verb", cli.COMMANDS)
def test_every_command_has_help_with_the_names_of_options_whole(
    verb: str, columns: int, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    code, shown, _ = command(verb, "--help")
    assert code == 0 and re.search(rf"Usage: .*{verb} \[OPTIONS\]", shown)
    assert "…" not in shown.replace("runs/…", "")


def test_an_unknown_command_is_answered_with_the_nearest(command: Command) -> None:
    known = ", ".join(cli.COMMANDS)
    said = f"UsageError: meshwise runn: no such command. Did you mean 'run'? Use one of {known}.\n"
    assert command("runn") == (2, "", said)


def test_no_command_shows_the_help_and_nothing_else(command: Command) -> None:
    code, out, err = command()
    assert code == 2 and "Usage:" in out + err and "UsageError" not in err


def test_the_page_of_failures_has_the_exit_codes_of_the_help(command: Command) -> None:
    table = FAILURES.read_text().split("<!-- EXIT_CODES -->")[1].split("<!-- end -->")[0]
    rows = re.findall(r"^\| ([\d, ]+) \| (.*) \|$", table, re.M)
    assert rows == list(cli.EXIT_CODES.items())
    assert {MeshwiseError.exit_code, UsageError.exit_code} <= {int(code) for code in list(cli.EXIT_CODES)[:4]}
    code, out, _ = command("--help")
    shown = " ".join(out.split())
    assert code == 0
    for number, meaning in cli.EXIT_CODES.items():
        assert f"{number} {meaning}" in shown
