"""Precision: what is stored in what, computed in what (parallel/precision.py), and when the loss is scaled."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from meshwise.parallel.precision import cast_batch, computing, store_parameters
from meshwise.spec.dtypes import PRECISIONS, dtypes_of
from meshwise.spec.plan import Plan
from meshwise.training.job.run import loss_scaler

COMPUTED = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp64": torch.float64}


def test_every_precision_of_a_plan_is_tested_here() -> None:
    assert COMPUTED.keys() == PRECISIONS.keys()


@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_forward_computes_in_its_precision_on_parameters_that_stay_wide(precision: str) -> None:
    model = nn.Linear(3, 2)
    store_parameters(model, dtypes_of(precision))
    stored = torch.float64 if precision == "fp64" else torch.float32
    with computing("cpu", dtypes_of(precision)):
        output = model(cast_batch(torch.ones(4, 3), dtypes_of(precision)))
    assert output.dtype == COMPUTED[precision]
    assert {p.dtype for p in model.parameters()} == {stored}
    output.float().sum().backward()
    assert {p.grad.dtype for p in model.parameters() if p.grad is not None} == {stored}


def test_float64_reaches_buffers_and_leaves_whole_numbers_alone() -> None:
    model = nn.BatchNorm1d(2)
    store_parameters(model, dtypes_of("fp64"))
    assert model.running_mean is not None and model.running_mean.dtype == torch.float64
    assert model.num_batches_tracked is not None and model.num_batches_tracked.dtype == torch.int64


def test_storing_keeps_the_parameters_an_optimizer_may_hold() -> None:
    model = nn.Linear(3, 2)
    before = list(model.parameters())
    store_parameters(model, dtypes_of("fp64"))
    assert all(a is b for a, b in zip(model.parameters(), before, strict=True))


def test_a_batch_in_float64_keeps_its_labels_and_flags() -> None:
    batch = {"x": torch.ones(2), "half": torch.ones(2).half(), "y": torch.tensor([1, 2]), "mask": torch.tensor([True])}
    cast = cast_batch(batch, dtypes_of("fp64"))
    assert {name: tensor.dtype for name, tensor in cast.items()} == {
        "x": torch.float64,
        "half": torch.float64,
        "y": torch.int64,
        "mask": torch.bool,
    }
    assert cast_batch(batch, dtypes_of("bf16")) is batch


@pytest.mark.parametrize("precision", PRECISIONS)
def test_only_float16_scales_the_loss(precision: str) -> None:
    scaler = loss_scaler("cpu", Plan(precision=precision))
    assert scaler.is_enabled() is (precision == "fp16")
    assert (scaler.scale(torch.tensor(1.0)).item() > 1) is (precision == "fp16")


def test_no_autocast_is_left_on_afterwards() -> None:
    with computing("cpu", dtypes_of("bf16")):
        assert torch.is_autocast_enabled("cpu")
    with computing("cpu", dtypes_of("fp32")):
        assert not torch.is_autocast_enabled("cpu")
    assert not torch.is_autocast_enabled("cpu")
