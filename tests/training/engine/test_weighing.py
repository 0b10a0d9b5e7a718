"""A loss and its weight, as a job's function may return them."""

from __future__ import annotations

from typing import Any

import numpy
import pytest
import torch
from torch import nn

from meshwise.spec.errors import UsageError
from meshwise.training.data.order import BatchSlice
from meshwise.training.engine.weighing import as_weight, split_weight

EIGHT, THREE, NONE = (BatchSlice(torch.arange(max(samples, 1)), samples, 16) for samples in (8, 3, 0))


@pytest.mark.parametrize("mean", [torch.tensor(2.0), torch.tensor([2.0]), torch.tensor([[2.0]])])
def test_a_mean_alone_is_weighed_by_its_samples(mean: torch.Tensor) -> None:
    found, weight = split_weight(mean, EIGHT, "the loss")
    assert found.shape == () and found.item() == 2.0
    assert weight is None


@pytest.mark.parametrize("weight", [3, 3.0, numpy.float32(3), torch.tensor(3), torch.tensor([3.0]), True])
def test_a_mean_may_come_with_its_weight(weight: Any) -> None:
    found, kept = split_weight((torch.tensor(2.0), weight), EIGHT, "the loss")
    assert found.item() == 2.0
    assert float(kept or 0) == float(weight)


def test_a_weight_of_none_leaves_it_to_the_samples() -> None:
    assert split_weight((torch.tensor(2.0), None), EIGHT, "the loss")[1] is None


@pytest.mark.parametrize("weight", [3, torch.tensor(3.0)])
def test_a_stand_in_weighs_nothing(weight: Any) -> None:
    kept = split_weight((torch.tensor(2.0), weight), NONE, "the loss")[1]
    assert kept is not None and float(kept) == 0.0


@pytest.mark.parametrize(
    ("result", "says"),
    [
        (torch.zeros(4), "returned a tensor of shape (4,), not one number. Return a mean, for example loss.mean()"),
        (torch.zeros(0), "shape (0,)"),
        (1.5, "returned a float"),
        (None, "returned a NoneType"),
        ({"loss": 1}, "returned a dict"),
        ((torch.tensor(1.0), 1, 2), "returned a tuple"),
    ],
)
def test_what_is_no_loss_is_told(result: Any, says: str) -> None:
    with pytest.raises(UsageError) as caught:
        split_weight(result, EIGHT, "the loss of job 'mine'")
    assert str(caught.value).startswith("the loss of job 'mine' returned ")
    assert says in str(caught.value)


def test_the_mean_keeps_its_graph_and_the_weight_has_none() -> None:
    x = nn.Parameter(torch.tensor([2.0]))
    mean, _ = split_weight(x * 3, EIGHT, "the loss")
    mean.backward()
    assert x.grad is not None and x.grad.item() == 3.0
    assert not as_weight(x * 3, x).requires_grad


@pytest.mark.parametrize("weight", [2**53 - 1, torch.tensor(2**53 - 1)])
def test_a_weight_is_exact_in_float64(weight: Any) -> None:
    found = as_weight(weight, torch.tensor(1.0))
    assert found.dtype == torch.float64 and found.shape == ()
    assert int(found.item()) == 2**53 - 1


@pytest.mark.parametrize(
    ("weight", "told"),
    [
        *((number, str(number)) for number in (-1, -0.5, float("nan"), float("inf"))),
        (torch.zeros(4, 10), r"a tensor of shape \(4, 10\)"),  # (loss, logits)
        ({"accuracy": 1.0}, "{'accuracy': 1.0}"),
    ],
)
def test_what_counts_nothing_is_no_weight(weight: Any, told: str) -> None:
    with pytest.raises(
        UsageError, match=f"the number of items that the loss is a mean over, 0 or more, but it is {told}"
    ):
        split_weight((torch.tensor(1.0), weight), EIGHT, "a loss")


def test_a_mean_over_nothing_counts_nothing_although_it_is_no_number() -> None:
    logits = torch.randn(3, 4, requires_grad=True)
    mean, weight = split_weight((nn.functional.cross_entropy(logits, torch.full((3,), -100)), 0), THREE, "a loss")
    (mean * weight).backward()
    assert mean == 0 and logits.grad is not None and not logits.grad.any()
    mean, _ = split_weight((torch.tensor(float("nan")), torch.tensor(2)), THREE, "a loss")
    assert mean.isnan()  # a loss over something that is no number stays one
