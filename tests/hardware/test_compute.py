"""What one device computes: figures make sense, shapes grow, and a budget ends it."""

from __future__ import annotations

import pytest
import torch

from meshwise.hardware.measure.compute import SHAPES, dtypes_of, matmuls
from meshwise.hardware.measure.processes import device_names, measure_alone, measure_here
from meshwise.hardware.measure.result import DeviceResult, PathResult, Progress
from meshwise.spec.devices import WorkerSlot
from meshwise.spec.machine import Matmul

CPU = torch.device("cpu")


def test_products_grow_and_say_what_they_were() -> None:
    found = list(matmuls(CPU, 0.5, ("fp32",)))
    sizes = [product.m for product in found]
    assert sizes == sorted(sizes) and sizes[0] == SHAPES[0]
    assert all(product.n in (product.m, 4 * product.m) and product.k == product.m for product in found)


def test_the_rate_counts_two_operations_a_multiply_and_add() -> None:
    assert Matmul("fp32", 10, 20, 30, 0.5).rate == 2 * 10 * 20 * 30 / 0.5


def test_no_product_changes_the_precision_of_others() -> None:
    before = torch.backends.cuda.matmul.allow_tf32
    list(matmuls(CPU, 0.05, dtypes_of(CPU)))
    assert torch.backends.cuda.matmul.allow_tf32 == before


@pytest.mark.usefixtures("takes_seconds")
def test_a_device_by_itself() -> None:
    found = measure_here("cpu:0", CPU, 0.3)
    assert found.device == "cpu:0" and found.memory_rate is not None and found.memory_rate > 1e8
    assert found.launch is not None and 1e-8 < found.launch < 1e-2


@pytest.mark.usefixtures("processes")
def test_workers_measure_each_their_own() -> None:
    heard: list[PathResult | DeviceResult] = []
    slots = [WorkerSlot("cpu", None, (), 1)] * 2
    measure_alone(slots, 0.4, Progress(done=heard.append))
    assert all(isinstance(found, DeviceResult) for found in heard)
    assert [found.device for found in heard] == device_names(slots) == ["cpu:0", "cpu:1"]
    assert all(found.matmuls and isinstance(found.matmuls[0], Matmul) for found in heard)
