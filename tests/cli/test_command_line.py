"""The options of a command are the fields of a dataclass: what is typed arrives there, and the help lists it."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Annotated

import pytest
import typer
from typer.testing import CliRunner

from meshwise.spec.options import Option
from meshwise.terminal.command_line import from_dataclass


@dataclass(frozen=True)
class Trip:
    place: Annotated[str | None, Option("where to go", argument=True)] = None
    _: KW_ONLY
    days: Annotated[int, Option("how long")] = 3
    speed: Annotated[float | None, Option("how fast")] = None
    folder: Annotated[str | Path, Option("for the pictures", name="--out", metavar="DIR")] = "here"
    stops: Annotated[tuple[str, ...], Option("where to rest", name="--stop")] = ()
    between: Annotated[tuple[str, str] | None, Option("two days", metavar="FROM TO")] = None
    fast: Annotated[bool, Option("no rest")] = False
    insured: Annotated[bool, Option("in case")] = True
    friends: int = 0


@pytest.fixture
def travel() -> tuple[typer.Typer, list[tuple[Trip, bool]]]:
    app, taken = typer.Typer(), []

    @app.command()
    @from_dataclass
    def travel(options: Trip, as_json: Annotated[bool, typer.Option("--json", help="as JSON")] = False) -> None:
        """Go somewhere."""
        taken.append((options, as_json))

    return app, taken


@pytest.mark.parametrize(
    ("words", "trip"),
    [
        ("", Trip()),
        ("rome", Trip("rome")),
        ("rome --days 4 --speed 2.5", Trip("rome", days=4, speed=2.5)),
        ("--out there --stop a --stop b", Trip(folder="there", stops=("a", "b"))),
        ("--between mon tue", Trip(between=("mon", "tue"))),
        ("--fast --no-insured", Trip(fast=True, insured=False)),
    ],
)
def test_what_is_typed_arrives_in_the_fields(
    words: str, trip: Trip, travel: tuple[typer.Typer, list[tuple[Trip, bool]]]
) -> None:
    app, taken = travel
    assert CliRunner().invoke(app, [*words.split(), "--json"]).exit_code == 0
    assert taken == [(trip, True)]


@pytest.mark.parametrize("words", ["--days many", "--friends 3", "--no-fast", "--between mon", "rome milan"])
def test_what_does_not_fit_a_field_is_refused(words: str, travel: tuple[typer.Typer, list[tuple[Trip, bool]]]) -> None:
    app, taken = travel
    assert CliRunner().invoke(app, words.split()).exit_code == 2 and not taken


def test_the_help_lists_each_option_with_its_words(travel: tuple[typer.Typer, list[tuple[Trip, bool]]]) -> None:
    shown = CliRunner().invoke(travel[0], ["--help"], env={"COLUMNS": "160"}).output
    for word in (
        "Go somewhere.",
        "where to go",
        "--days",
        "how long",
        "--out",
        "DIR",
        "FROM TO",
        "--stop",
        "--no-insured",
    ):
        assert word in shown
    assert "friends" not in shown and "--no-fast" not in shown
