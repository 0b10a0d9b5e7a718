"""The line in which a loss stops being a mean over samples, and why. Of checker/loss_numbers.py."""

from __future__ import annotations

from typing import Any

import pytest

from tests.checker.script_sides import as_it_was, proof  # noqa: F401
from tests.checker.strangers import LOSSES

LOSS = "train.py:30 ("
OVER = "is a mean over 28, and over 11, 17 on the ranks, which have 4, 4 samples"
SAY = "Say over how much: mw.backward(loss, weight=n), or let a job's loss return (loss, n), where n is "
WRONG = {
    "mean and a tenth of a sum": ("loss = error.mean() + 0.1 * error.sum()", "adds a mean over samples and a sum"),
    "mean and a sum of something else": (
        "loss = error.mean() + 0.1 * error.abs().sqrt().sum()",
        "adds a mean over samples and a sum over them (sum in train.py:30",
    ),
    "divided by a count in Python": (
        "loss = (error * mask).sum() / sum(lengths)",
        f"{OVER}. {SAY}sum(lengths) of that line.",
    ),
    "mean over what a mask leaves": ("loss = error[mask].mean()", f"{OVER}. {SAY}error[mask].numel() of that line."),
    "targets that are ignored": (
        "loss = nn.functional.cross_entropy(torch.stack([error, -error], 1), (y > 0).long().masked_fill(~mask, -100))",
        OVER,
    ),
    "each divided by the count": (
        "loss = (error * mask / mask.sum()).sum()",
        "weigh 0.392857, 0.607143 on one device and 0.5, 0.5 under the plan; they have 4, 4 samples. train.py:30",
    ),
    "times the ranks": (
        "loss = error.mean() * size()",
        "2 times that of one device, where what it multiplies is equal",
    ),
}
"""The loss, and what is said of its line."""
COUPLED = {
    "root of a mean": "loss = error.mean().sqrt()",
    "logarithm of a sum": "loss = error.mean(1).logsumexp(0)",
    "product of means": "loss = error.mean() * error.abs().mean()",
    "divided by what the model gives": "loss = 1 - (error * y).sum() / (error + y).sum()",
}
"""No weights of the ranks give these."""
RIGHT = {
    "a mean": "loss = error.mean()",
    "a mean and a penalty": "loss = error.mean() + 0.1 * sum(p.square().sum() for p in model.parameters())",
    "a metric beside it": "metric = (error * mask).sum() / mask.sum(); loss = error.mean(); metric = loss.exp()",
}


@pytest.mark.parametrize("name", WRONG)
def test_a_loss_that_is_no_mean_over_samples_is_told_with_its_line(name: str, pool: Any) -> None:
    loss, says = WRONG[name]
    found = proof(LOSSES.replace("{loss}", loss), pool)
    assert found.cause is not None and found.cause.name == "loss weighting", found.cause
    assert LOSS in found.cause.evidence and says in found.cause.evidence, found.cause.evidence


@pytest.mark.parametrize("name", COUPLED)
def test_a_loss_that_no_weights_give_is_coupled(name: str, pool: Any) -> None:
    found = proof(LOSSES.replace("{loss}", COUPLED[name]), pool)
    assert found.cause is not None and found.cause.name == "coupled samples", found.cause
    assert "train.py:30" in found.cause.evidence


@pytest.mark.parametrize("name", RIGHT)
def test_a_loss_that_is_a_mean_is_equal(name: str, pool: Any) -> None:
    found = proof(LOSSES.replace("{loss}", RIGHT[name]), pool)
    assert found.equal, (found.comparison.first, found.cause)
