"""What the log of a run writes and sends, and what stops it. On several ranks: tests/faults and test_equal_losses."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch

from meshwise.spec.errors import LossError
from meshwise.spec.world import World
from meshwise.training.tracking.metrics_log import MetricsLog

ALONE = World()


def losses(*values: float) -> list[Any]:
    """The microbatches of a step, as (loss, weight): the second weighs twice as much as the first, and so on."""
    return [(torch.tensor(value), torch.tensor(float(i))) for i, value in enumerate(values, start=1)]


def lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture
def log(tmp_path: Path) -> Iterator[MetricsLog]:
    made = MetricsLog(tmp_path, None, ALONE, scaled=False)
    yield made
    made.tracking.close()


def test_losses_are_weighted_means_and_written_when_they_are_gathered(log: MetricsLog, tmp_path: Path) -> None:
    log.pending.append((0, 1, losses(3.0, 6.0)))
    log.pending.append((0, 2, losses(4.0)))
    assert log.last_loss is None and not (tmp_path / "metrics.jsonl").exists()
    log.sync()
    assert log.losses == [5.0, 4.0] and log.last_loss == 4.0
    assert lines(tmp_path) == [{"epoch": 1, "step": 1, "loss": 5.0}, {"epoch": 1, "step": 2, "loss": 4.0}]
    log.sync()
    assert log.losses == [5.0, 4.0]  # each once


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_loss_that_is_not_finite_stops_the_run_with_its_step_and_rank(value: float, log: MetricsLog) -> None:
    log.pending.append((0, 7, losses(0.5)))
    log.pending.append((0, 8, losses(value)))
    with pytest.raises(LossError, match=rf"step 8: the loss is {value} on rank 0\. Lower the learning rate"):
        log.sync()


def test_under_a_loss_scaler_such_a_step_is_only_skipped(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path, None, ALONE, scaled=True)
    with closing(log.tracking):
        log.pending.append((0, 1, losses(math.inf)))
        log.sync()
    assert log.losses == [math.inf]


def test_a_resumed_run_writes_over_what_came_after_its_state(log: MetricsLog, tmp_path: Path) -> None:
    for step in (1, 2, 3):
        log.pending.append((0, step, losses(float(step))))
    log.sync()
    log.begin(2)
    assert [line["step"] for line in lines(tmp_path)] == [1, 2]


def test_an_evaluation_is_written_and_sent(tmp_path: Path) -> None:
    sent: list[tuple[str, dict[str, Any]]] = []
    log = MetricsLog(tmp_path, lambda kind, **facts: sent.append((kind, facts)), ALONE, scaled=False)
    with closing(log.tracking):
        log.add_evaluation(1, 3, 40, {"accuracy": 0.5})
    assert lines(tmp_path) == [{"epoch": 2, "step": 40, "test": {"accuracy": 0.5}}]
    assert sent == [("evaluated", {"epoch": 2, "epochs": 3, "metrics": {"accuracy": 0.5}, "best": False})]
