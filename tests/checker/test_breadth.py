"""Ten published architectures under each axis, as bench/breadth.py holds all of them; and how its page reads."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
PLACES = [str(ROOT / "bench"), str(ROOT / "tests" / "programs" / "models")]
NAMES = ("Qwen3ForCausalLM", "MixtralForCausalLM", "BloomForCausalLM", "MambaForCausalLM", "RobertaForMaskedLM")
NAMES += ("FunnelForMaskedLM", "SqueezeBertForMaskedLM", "T5ForConditionalGeneration", "SwinForImageClassification")
NAMES += ("WhisperForConditionalGeneration",)
HARDLY_DIVIDED = {("MixtralForCausalLM", "tensor")}
"""Of experts in one parameter: right, and less than half of the parameters is split."""


def script(name: str) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "path", [*PLACES, *sys.path])
        return importlib.import_module(name)


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


def test_the_page_tells_what_is_equal_refused_or_wrong() -> None:
    entry: dict[str, Any] = {"task": "causal"} | {plan: {"status": "equal"} for plan in ("data", "shard", "context")}
    entry["tensor"] = {"status": "refused", "text": "tensor: net.layers.0 no. Use another."}
    entry["pipeline"] = {"status": "timeout", "text": "ranks [1] did not answer"}
    versions = {"transformers": "5", "timm": "1", "torchvision": "0"}
    results = {"machine": {"torch": "2", "date": "today"}, "versions": versions, "architectures": {"Net": entry}}
    page = script("architectures_page").page(results)
    assert "| Net | equal | equal | refused (1) | **wrong** (2) | equal |\n" in page
    assert "1. tensor: ….N no.\n2. ranks [1] did not answer.\n" in page
