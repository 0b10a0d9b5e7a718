"""The page of plans: it draws without an error, loads nothing, and its figures are those of the plans."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from meshwise.planner.plan import Plans, page, plan
from meshwise.planner.views.plan_page import POINTS
from meshwise.spec.plan import Plan
from tests.reports.views.test_html_page import drawn, needs_browser


@pytest.fixture(scope="module")
def plans() -> Plans:
    return plan("mnist-cnn", machine="2xA100", seconds=0.01)


def values_in(html: str) -> dict:
    found = re.search(r'id="report">(.*?)</script>', html, re.DOTALL)
    assert found is not None
    return json.loads(found[1])


def test_the_page_has_the_table_the_step_and_its_memory(plans: Plans) -> None:
    told = values_in(page(plans).html)
    first = plans.found.estimates[0]
    shown = told["plan"]
    assert told["source"] == "predicted" and shown["title"] == "mnist-cnn on 2xA100, batch 256, computed in fp32"
    assert shown["table"]["rows"][0][:2] == ["1", "data=1"]
    assert shown["limits"][0].startswith("What limits it: ") and shown["costly"][0]["titles"][0] == "operator"
    assert {bar["kind"] for bar in told["views"][0]["bars"]} >= {"forward", "backward", "optimizer"}
    memory = shown["memory"]
    sums = [sum(sizes) for sizes in zip(*memory["categories"].values(), strict=True)]
    assert max(sums) == first.memory.allocated and len(sums) == len(memory["at"]) <= POINTS + 1
    assert memory["at"] == sorted(memory["at"]) and memory["at"][-1] <= first.seconds.value * 1e3


def test_without_times_the_memory_is_drawn_all_the_same() -> None:
    told = values_in(page(plan("mnist-mlp", machine="2xcpu", fits=Plan(data=2), seconds=0.01)).html)["plan"]
    assert told["table"]["rows"][0][:2] == ["data=2", "unknown"] and not told["costly"]
    assert told["memory"]["axis"] == "operators and collectives of the step"
    assert told["memory"]["categories"]["parameters"][0] > 0


@needs_browser
@pytest.mark.slow
@pytest.mark.usefixtures("processes")
def test_a_browser_draws_it_without_an_error(plans: Plans, tmp_path: Path) -> None:
    seen = drawn(page(plans).html, tmp_path)
    assert seen.root["data-drawn"] == "yes" and seen.root["data-errors"] == "0"
    assert not seen.console and not seen.requests
