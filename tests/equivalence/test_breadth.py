"""Ten published architectures under each axis, as bench/breadth.py holds all of them; and the page it writes."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from typing import Any

import pytest

BENCH = Path(__file__).parents[2] / "bench"
NAMES = ("Qwen3ForCausalLM", "MixtralForCausalLM", "BloomForCausalLM", "MambaForCausalLM", "RobertaForMaskedLM")
NAMES += ("FunnelForMaskedLM", "SqueezeBertForMaskedLM", "T5ForConditionalGeneration", "SwinForImageClassification")
NAMES += ("WhisperForConditionalGeneration",)
HARDLY_DIVIDED = {("MixtralForCausalLM", "tensor")}
"""Of experts in one parameter: right, and less than half of the parameters is split."""


def script(name: str) -> Any:
    sys.path.insert(0, str(BENCH))
    try:
        return importlib.import_module(name)
    finally:
        sys.path.remove(str(BENCH))


@pytest.mark.slow
@pytest.mark.parametrize("plan", ["data", "shard", "tensor", "pipeline"])
@pytest.mark.parametrize("name", NAMES)
def test_an_architecture_is_what_one_device_computes(name: str, plan: str, pool: Any) -> None:
    row = script("breadth").hold(pool(2), name, plan, {}, limit=300)
    assert row["status"] == ("equal, hardly divided" if (name, plan) in HARDLY_DIVIDED else "equal"), row


def test_architectures_are_tiny_and_come_from_what_is_installed() -> None:
    models = script("tiny_models")
    assert len(models.architectures()) > 300 and set(NAMES) <= set(models.architectures())
    model = models.model_of("LlamaForCausalLM")
    assert sum(p.numel() for p in model.parameters()) < 100_000 and len(model.model.layers) == 2


def test_the_page_is_what_the_script_writes() -> None:
    table = script("breadth_table")
    results = json.loads((BENCH / "results" / "breadth.json").read_text())
    own = table.PAGE.read_text().partition("\n## Models of other packages")[0]
    assert own == table.page(results), "run python bench/breadth.py --table"


def test_what_is_refused_or_wrong_is_told() -> None:
    table = script("breadth_table")
    results = json.loads((BENCH / "results" / "breadth.json").read_text())
    first, second = list(results["architectures"].values())[:2]
    first["data"] = {"status": "refused", "text": "data: net.layers.0 no. Use another."}
    second["data"] = {"status": "timeout", "text": "ranks [1] did not answer"}
    page = table.page(results)
    assert "| refused (" in page and "**wrong** (" in page and ". data: ….N no.\n" in page
