"""docs/models.md is what its script makes of the committed results."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

BENCH = Path(__file__).parents[2] / "bench"


def table() -> Any:
    spec = importlib.util.spec_from_file_location("model_table", BENCH / "model_table.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_is_what_the_script_writes() -> None:
    script = table()
    results = json.loads((BENCH / "results" / "equivalence.json").read_text())
    assert script.PAGE.read_text() == script.page(results), "run python bench/model_table.py"


def test_what_is_refused_or_differs_is_told() -> None:
    script = table()
    results = json.loads((BENCH / "results" / "equivalence.json").read_text())
    first, second = list(results["measured"].values())[:2]
    first["refused"], second["equal"] = "shard: no.", False
    page = script.page(results)
    assert "| refused (" in page and "Refused: shard: no." in page and "**differs**" in page
