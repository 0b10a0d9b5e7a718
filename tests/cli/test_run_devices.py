"""Where no --devices are named, a plan has as many CPU workers as it needs."""

from __future__ import annotations

import pytest
import torch

from meshwise.api.run import _slots
from meshwise.training.request import RunRequest
from meshwise.workers.nodes import NodeOptions


@pytest.mark.skipif(torch.accelerator.is_available(), reason="this machine has accelerators")
@pytest.mark.parametrize(
    ("request_", "workers"),
    [
        (RunRequest(), 1),
        (RunRequest(settings="shard=4"), 4),
        (RunRequest(settings="recompute=full"), 1),
        (RunRequest(plan="data = 2\nshard = 2"), 4),
        (RunRequest(plan="data = 2", devices="3xcpu"), 3),
    ],
)
def test_a_plan_has_the_workers_that_it_needs(request_: RunRequest, workers: int) -> None:
    assert len(_slots(request_, NodeOptions())) == workers
