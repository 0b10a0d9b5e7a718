"""How docs/internals/models.md reads: a number where a plan works, a reason where it is refused."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest

BENCH = Path(__file__).parents[2] / "bench"


def test_what_works_is_refused_or_differs_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCH))
    script = importlib.import_module("models_page")
    shared = {"model": "Net", "label": "data", "plan": "Plan(data=2)"}
    cases: list[dict[str, Any]] = [
        shared | {"equal": True, "largest": {"losses": 2e-13}},
        shared | {"model": "Other", "equal": False, "largest": {"losses": 1e-3}},
        shared | {"label": "shard", "plan": "Plan(shard=2)", "refused": "shard: no."},
    ]
    model = {"parameters": 1000, "source": "torch", "lines_changed": 0}
    results: dict[str, Any] = {"machine": {"torch": "2", "date": "today"}, "transformers": "5", "commits": {"abc": 3}}
    results |= {"claims": {"largest": "<= 1e-9"}, "steps": 5, "cases": 3, "equal": 1, "refused": 1, "not_checked": 0}
    results |= {"largest": 2e-13, "false_alarms": 0, "clean_runs": [], "models": {"Net": model, "Other": model}}
    page = script.page(results | {"measured": dict(enumerate(cases))})
    assert "| data: `Plan(data=2)` | 2e-13 | **differs** |" in page
    assert "| shard: `Plan(shard=2)` | refused (1) |" in page and "1. Refused: shard: no." in page
