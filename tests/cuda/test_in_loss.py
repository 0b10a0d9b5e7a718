"""A loss of sums over the whole batch, by `mw.sum(…, grad=True)`, trains on GPUs what CPU workers train."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from meshwise.spec.plan import Plan
from meshwise.spec.plan_file import plan_to_toml
from tests.training.script.test_in_loss import LOSSES, Loss, correlation, dice, train

pytestmark = pytest.mark.evidence("sums and means in a loss keep their gradient, as on CPU workers")

CASES = [(Plan(data=2), loss) for loss in LOSSES] + [(Plan(shard=2), loss) for loss in (dice, correlation)]


@pytest.mark.parametrize(("plan", "loss"), CASES, ids=lambda value: getattr(value, "__name__", str(value)))
def test_a_loss_of_sums_over_all_ranks_trains_as_on_cpu_workers(
    gpus: Any, pool: Any, loss: Loss, plan: Plan, tmp_path: Any
) -> None:
    file = tmp_path / "plan.toml"
    file.write_text(plan_to_toml(plan))
    (want, _), (got, other) = pool(2).run(train, loss, str(file)), gpus(2).run(train, loss, str(file))
    assert got[0] == other[0] and len(got[0]) == len(want[0]) > 0
    torch.testing.assert_close(torch.tensor(got[0]), torch.tensor(want[0]), rtol=1e-12, atol=1e-14)
    for a, b in zip(got[1], want[1], strict=True):
        torch.testing.assert_close(a.cpu(), b, rtol=1e-12, atol=1e-14)
