"""A function of one dataclass is called, typed and explained as a function of its fields."""

from __future__ import annotations

import inspect
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Annotated

import pytest

from meshwise.spec.options import Option, option_name, options_of, takes


@dataclass(frozen=True)
class Bake:
    cake: Annotated[str, Option("what is baked", argument=True)]
    _: KW_ONLY
    batch_size: Annotated[int | None, Option("cakes at a time")] = None
    folder: Annotated[str | Path, Option("where they are put", name="--out", scripts=False)] = "oven"


@takes(Bake)
def bake(options: Bake) -> str:
    """Bake a cake."""
    return f"{options.batch_size} {options.cake} in {options.folder}"


def test_the_fields_are_the_arguments() -> None:
    assert bake("pie", batch_size=3, folder=Path("pan")) == "3 pie in pan"
    assert bake(cake="pie") == "None pie in oven"
    with pytest.raises(TypeError, match="temperature"):
        bake("pie", temperature=3)  # type: ignore[call-arg]


def test_the_signature_and_the_help_show_them() -> None:
    path = inspect.formatannotation(str | Path)  # pathlib._local.Path on Python 3.13
    shown = f"(cake: str, *, batch_size: int | None = None, folder: {path} = 'oven') -> str"
    assert str(inspect.signature(bake)) == shown
    assert inspect.getdoc(bake) == (
        "Bake a cake.\n\ncake: what is baked.\nbatch_size: cakes at a time.\nfolder: where they are put."
    )


def test_options_have_the_names_of_the_command_line() -> None:
    found = {name: (option_name(name, option), option.scripts) for name, _, option in options_of(Bake)}
    assert found["batch_size"] == ("--batch-size", True) and found["folder"] == ("--out", False)
