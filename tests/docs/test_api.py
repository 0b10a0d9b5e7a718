"""docs/api.md is what the docstrings say, and docs/failures.md has the exit codes and options of the command's help."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

import meshwise as mw

MAKER = Path(__file__).parents[2] / "docs" / "make_api.py"


@pytest.fixture(scope="module")
def maker() -> ModuleType:
    spec = importlib.util.spec_from_file_location("make_api", MAKER)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_is_fresh(maker: ModuleType) -> None:
    assert maker.PAGE.read_text(encoding="utf-8") == maker.page(), "run `python docs/make_api.py`"


def test_the_page_of_failures_has_the_words_of_the_help(maker: ModuleType) -> None:
    page = maker.FAILURES.read_text(encoding="utf-8")
    assert maker.failures(page) == page, "run `python docs/make_api.py`"
    for name in ("--restarts", "| 85 |", "| 93 |"):
        assert name in page


def test_every_public_name_is_on_it_and_says_what_it_is(maker: ModuleType) -> None:
    page = maker.page()
    assert [name for name in mw.__all__ if f"\n### mw.{name}\n" not in page] == []
    assert [name for name in mw.__all__ if not (getattr(mw, name).__doc__ or "").strip()] == []
    assert " at 0x" not in page and "meshwise.training.script." not in page


def test_lines_that_name_a_parameter_become_a_list(maker: ModuleType) -> None:
    text = "Adds.\n\nvalue: a number,\nor two. other, third: more.\n    more still.\nRaises UsageError."
    assert maker.prose(text) == (
        "Adds.\n\n- `value`: a number,\n  or two. other, third: more.\n    more still.\nRaises UsageError."
    )
