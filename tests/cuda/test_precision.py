"""Narrow precision on fake GPUs. The jobs here have no operator that autocast treats in another way than on the CPU, so
that they are equal to CPU workers bit for bit."""

from __future__ import annotations

from typing import Any

import pytest

from meshwise.spec.plan import Plan
from tests.cuda.sides import apart, known, trained

pytestmark = pytest.mark.evidence(
    "bf16 and fp16 with a scaled loss train as on CPU workers, within the bound that the test states"
)

WIDTHS = [{"precision": "bf16"}, {"precision": "fp16"}, {"precision": "bf16", "grad_dtype": "bf16"}]
PLANS = [
    {"data": 2, "zero1": True},
    {"data": 2, "accumulate": 2, "recompute": "selective", "offload": ("activations",)},
    {"shard": 2},
    {"shard": 2, "offload": ("parameters",)},
    {"tensor": 2},
    {"context": 2},
    {"pipeline": 2, "accumulate": 2},
]


@pytest.mark.parametrize("width", WIDTHS, ids=str)
def test_gpus_train_in_half_precision_what_cpu_workers_do(gpus: Any, pool: Any, width: dict[str, Any]) -> None:
    for settings in PLANS:
        plan = Plan(**settings, **width)
        want, got = known(pool(2), "decoder", plan), trained(gpus(2), "decoder", plan)
        assert apart(want, got) == 0, plan
        assert apart(want, known(pool(2), "decoder", Plan(**settings))) > 1e-4, plan  # it is narrow
