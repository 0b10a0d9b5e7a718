"""Complex parameters train as on one device, keep their imaginary parts in every precision, and are compared whole.

Of torch_compat/modules.py.
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from meshwise.parallel.precision import cast_batch
from meshwise.spec.plan import Plan
from meshwise.torch_compat.loss_scale import Scaler
from meshwise.torch_compat.modules import as_real, store_model
from meshwise.training.job.loop import run_job
from meshwise.training.job.options import RunOptions
from meshwise.training.recovery.weights import save_weights
from tests.checker.jobs_to_check import Spectral, checked, complex_numbers
from tests.checker.seams import after_backward


@pytest.mark.parametrize(
    ("dtype", "beside"),
    [
        (torch.float64, torch.complex128),
        (torch.float32, torch.complex64),
        (torch.bfloat16, torch.complex64),
        (torch.float16, torch.complex64),
    ],
)
def test_what_is_stored_beside_floats_keeps_its_imaginary_part(dtype: torch.dtype, beside: torch.dtype) -> None:
    model = Spectral()
    weight = model.weight.detach().clone()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        store_model(model, dtype)
    assert (model.out.weight.dtype, model.weight.dtype, model.turn.dtype) == (dtype, beside, beside)
    assert torch.equal(model.weight.detach().to(torch.complex64), weight) and model.weight.requires_grad


def losses(precision: str, devices: int, **plan: Any) -> Any:
    job = complex_numbers()
    options = RunOptions(plan=Plan(data=devices, precision=precision, **plan))
    return run_job(job, options, None)["losses"]


@pytest.mark.parametrize(("precision", "most"), [("fp32", 1e-5), ("fp64", 1e-12), ("bf16", 0.02), ("fp16", 0.02)])
def test_two_devices_train_complex_parameters_as_one_does(precision: str, most: float, pool: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        alone = losses(precision, 1)
    for got in pool(2).run(losses, precision, 2):
        torch.testing.assert_close(got, alone, rtol=0, atol=most)
    torch.testing.assert_close(alone, losses("fp32", 1), rtol=0, atol=0.02)


@pytest.mark.parametrize("plan", [Plan(data=2), Plan(data=2, zero1=True), Plan(tensor=2)], ids=repr)
def test_a_check_of_complex_parameters_is_equal_and_sees_imaginary_parts(plan: Plan, pool: Any) -> None:
    proof = checked(pool, "complex", plan)
    assert proof.equal, (proof.comparison.first, proof.cause)


def conjugate(named: dict[str, nn.Parameter]) -> None:
    gradient = named["weight"].grad
    assert gradient is not None
    gradient.imag.mul_(1 - 1e-6)


def test_a_check_sees_imaginary_parts(pool: Any) -> None:
    proof = checked(pool, "complex", Plan(data=2), plant=after_backward(conjugate))
    first = proof.comparison.first
    assert first is not None and (first.kind, first.name) == ("gradients", "weight")


def test_batches_of_complex_numbers_go_with_the_parameters() -> None:
    x, z = cast_batch((torch.zeros(2), torch.tensor([1j])), Plan(precision="fp64").dtypes)
    assert (x.dtype, z.dtype) == (torch.float64, torch.complex128) and z[0] == 1j


def test_a_loss_scaler_unscales_complex_gradients() -> None:
    p = nn.Parameter(torch.tensor([1 + 1j]))
    optimizer, scaler = torch.optim.SGD([p], lr=1.0), Scaler("cpu")
    scaler.scale(as_real(p).sum()).backward()
    scaler.unscale_(optimizer)
    assert p.grad is not None and p.grad.tolist() == [1 + 1j]
    scaler.step(optimizer)
    assert p.tolist() == [0]
    scaler.update()
    optimizer.zero_grad()
    scaler.scale(as_real(p).sum() * float("inf")).backward()
    scaler.step(optimizer)
    assert p.tolist() == [0]  # an infinite gradient is not stepped


def test_weights_of_complex_numbers_are_written(tmp_path: Path) -> None:
    model = Spectral()
    store_model(model, torch.float64)
    save_weights(model, tmp_path / "weights.safetensors")
    assert torch.equal(load_file(tmp_path / "weights.safetensors")["weight"], model.weight.detach().to(torch.complex64))
