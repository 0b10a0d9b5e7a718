"""A planted spike is told, and an ordinary noisy run is not."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from meshwise.job.loop import run_job
from meshwise.job.options import RunOptions
from meshwise.job.spikes import LEAST, WINDOW, Spikes
from meshwise.records.checkpoints import CHECKPOINTS, checkpoints_in
from meshwise.records.files import read_lines
from meshwise.spec.errors import UsageError
from meshwise.spec.plan import Plan
from tests.faults.job_with_nan import job
from tests.pool import Pool


def noisy(steps: int, kind: str, seed: int) -> list[float]:
    """Losses as runs have them: falling from 10 to 2, each the mean over a batch."""
    generator = torch.Generator().manual_seed(seed)
    falling = [2 + 8 * math.exp(-step / 300) for step in range(steps)]
    normal = torch.randn(steps, generator=generator)
    noise = {
        "normal": 1 + 0.05 * normal,
        "skewed": (0.3 * normal).exp(),
        "sometimes hard": 1 + 0.1 * normal + 0.5 * (torch.rand(steps, generator=generator) < 0.02),
        "none": torch.ones(steps),
    }[kind]
    return [loss * factor for loss, factor in zip(falling, noise.tolist(), strict=True)]


def told(losses: list[float], every: int = 10) -> list[str]:
    spikes = Spikes()
    found = [spikes.look(losses[:step], step) for step in range(every, len(losses) + 1, every)]
    return [text for text in found if text]


@pytest.mark.parametrize("kind", ["normal", "skewed", "sometimes hard", "none"])
def test_an_ordinary_run_has_no_spike(kind: str) -> None:
    assert [text for seed in range(5) for text in told(noisy(4000, kind, seed))] == []


@pytest.mark.parametrize("kind", ["normal", "skewed", "sometimes hard", "none"])
def test_a_planted_spike_is_told_once_with_its_first_step(kind: str) -> None:
    losses = noisy(2000, kind, 0)
    losses[1203:1218] = [12.0] * 15
    (text,) = told(losses)
    assert text.startswith("step 1204: the loss is 12, ")
    assert f"of the {WINDOW} losses before it" in text


def test_a_second_spike_is_told_too_and_the_first_losses_are_not_judged() -> None:
    losses = [50.0, *([1.0] * (LEAST - 2)), 50.0, *([1.0] * 100)]
    assert told(losses) == []
    losses[40] = losses[60] = 9.0
    assert [text.split(":")[0] for text in told(losses)] == ["step 41", "step 61"]


def test_a_step_of_a_run_that_was_resumed_is_named_by_its_number() -> None:
    spikes = Spikes()
    assert not spikes.look([1.0] * 30, 530)
    assert spikes.look([1.0] * 30 + [9.0] * 10, 540).startswith("step 531: ")


def test_a_word_that_is_not_known_is_refused() -> None:
    with pytest.raises(UsageError, match=r"--on-spike='safe' is not known\. Did you mean 'save'"):
        RunOptions("mlp", on_spike="safe")


def trained(folder: str) -> Any:
    """100 steps; the labels of the 72nd batch are wrong."""
    said: list[str] = []
    x = torch.randn(1600, 6, generator=torch.Generator().manual_seed(0))
    y = x.sum(1, keepdim=True)
    order = torch.randperm(1600, generator=torch.Generator().manual_seed(0))
    y[order[71 * 16 : 72 * 16]] += 1000.0
    made = replace(job, data=lambda: (x, y), epochs=1, seed=0)
    options = RunOptions(on_spike="save", plan=Plan(data=2))
    run_job(made, options, Path(folder), lambda kind, **facts: said.append(facts["text"]) if kind == "told" else None)
    return said


def test_both_ranks_save_after_the_spike(pool: Any, tmp_path: Path) -> None:
    workers: Pool = pool(2)
    (text,), others = workers.run(trained, str(tmp_path))
    assert others == [] and text.startswith("step 72: the loss is ") and text.endswith("after step 80 is saved.")
    assert [saved.step for saved in checkpoints_in(tmp_path / CHECKPOINTS)] == [80, 100]
    assert max(read_lines(tmp_path / "metrics.jsonl"), key=lambda line: line["loss"])["step"] == 72
