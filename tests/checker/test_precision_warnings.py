"""A plan that is equal in float64, and other figures that say it is not: not judged, with exit code 4.

Of checker/precision_warnings.py, and of what checker/printed_numbers.py tells apart.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from meshwise.checker.compare import compare
from meshwise.checker.one_device import one_device
from meshwise.checker.precision_warnings import NO_ROUNDING, rounding_warnings, unproven
from meshwise.checker.printed_numbers import printed_otherwise
from meshwise.checker.proof import Verdict
from meshwise.checker.trace import CheckSpec
from meshwise.spec.dtypes import dtypes_of
from meshwise.spec.plan import Plan
from tests.checker.jobs_to_check import checked, job_of, layers
from tests.checker.script_sides import as_it_was, proof  # noqa: F401  # the fixture
from tests.checker.scripts import SCRIPT

CAST = SCRIPT.replace(
    "loss = criterion(model(x), y)", "loss = criterion(model(x if mw.world_size() == 1 else x.bfloat16().to(x)), y)"
)
assert CAST != SCRIPT


@pytest.mark.parametrize("text", [SCRIPT, CAST])
def test_a_cast_of_one_side_alone_is_not_judged(text: str, pool: Any) -> None:
    found = proof(text, pool, rounding=True)
    assert found.equal, "float64 lifts the cast"
    assert found.verdict is (Verdict.NOT_JUDGED if text == CAST else Verdict.EQUAL), found.not_judged
    assert [text.split(" is ")[0] for text in found.not_judged] == (
        ["rounding of the loss in step 1", "rounding of the gradients in step 1"] if text == CAST else []
    )
    assert NO_ROUNDING not in found.notes


def test_a_plan_in_low_precision_is_judged_by_that(pool: Any) -> None:
    found = proof(SCRIPT, pool, Plan(data=2, precision="bf16"), rounding=True)
    assert found.verdict is Verdict.EQUAL, found.not_judged


@pytest.mark.parametrize("name", ["plain", "weighed"])  # clipped, and not
def test_gradients_are_shown_without_the_scale_of_a_job_in_fp16(name: str, pool: Any) -> None:
    found = checked(pool, name, Plan(data=2, precision="fp16"), steps=2, rounding=True)
    rounding = {each.kind: each.plan for each in found.rounding}
    assert found.verdict is Verdict.EQUAL and rounding["gradients"] < 0.1 and rounding["gradient norm"] < 0.1


def test_what_was_not_looked_at_is_said(pool: Any) -> None:
    found = proof(CAST, pool)
    assert found.verdict is Verdict.EQUAL and NO_ROUNDING in found.notes


def test_the_floor_is_a_hundred_times_the_rounding_of_one_device_and_of_the_precision() -> None:
    job = job_of(layers)
    one = one_device(job, CheckSpec(Plan(), steps=1))
    sides = {size: one_device(job, CheckSpec(Plan(), steps=1)) for size in (0.0, 1e-6, 1e-5, 2e-5, 1e-3)}
    for size, side in sides.items():
        side.steps[0].loss *= 1 + size
    against = {size: compare(one, side) for size, side in sides.items()}

    def said(mine: float, plan: float, precision: str = "fp32", **dtypes: str) -> int:
        return len(list(rounding_warnings([against[mine], against[plan]], dtypes_of(precision, **dtypes))))

    assert [said(0.0, size) for size in (1e-6, 1e-5, 2e-5)] == [0, 0, 1]
    assert [said(1e-5, 1e-3), said(1e-6, 1e-3)] == [0, 1]
    assert said(0.0, 1e-3, "bf16") == said(0.0, 1e-3, grad_dtype="bf16") == 0, "one device does not reduce"


def test_after_a_loss_that_is_no_number_nothing_is_proven() -> None:
    one = one_device(job_of(layers), CheckSpec(Plan(), steps=3))
    assert list(unproven(one)) == []
    one.steps[2].loss = float("nan")
    one.steps[1].gradients["2.bias"][0] = torch.inf
    assert list(unproven(one)) == [
        "nothing is proven from step 2 on: the gradient of 2.bias is not finite on both sides."
    ]


@pytest.mark.parametrize(
    ("one", "many"),
    [
        ("loss 0.5312", "loss 0.5401"),
        ("val_loss 0.5312, count 45", "val_loss 0.5312, count 23"),
        ("rank 0 loss 0.51", "rank 0 loss 0.62"),
        ("right 45 / 60", "right 23 / 60"),
        ("in 1.2 s: 45 tokens", "in 1.9 s: 30 tokens"),
    ],
)
def test_numbers_that_should_be_one_are_not_judged(one: str, many: str) -> None:
    wrong, harmless = printed_otherwise([("a.py:1", one)], [("a.py:1", many)], "2xcpu")
    assert len(wrong) == 1 and not harmless


@pytest.mark.parametrize(
    ("one", "many"),
    [
        ("epoch 1: loss 0.5, 1.20 s", "epoch 1: loss 0.5, 1.91 s"),
        ("step_time 0.0123", "step_time 0.0312"),
        ("812 samples/s", "513 samples/s"),
        ("812.5 tokens per second", "513.5 tokens per second"),
        ("peak memory 1.5 GiB", "peak memory 0.7 GiB"),
        ("trains on 1 device", "trains on 2 devices"),
        ("world_size 1", "world_size 2"),
        ("at 23:59:12", "at 23:59:47"),
    ],
)
def test_times_memory_and_devices_are_not(one: str, many: str) -> None:
    wrong, harmless = printed_otherwise([("a.py:1", one)], [("a.py:1", many)], "2xcpu")
    assert not wrong and len(harmless) == 1


def test_a_number_that_one_device_does_not_repeat_is_of_the_moment() -> None:
    sides = [("a.py:1", "at 0.31")], [("a.py:1", "at 0.55")]
    assert printed_otherwise(*sides, "2xcpu", [("a.py:1", "at 0.3101")])[0]
    assert not printed_otherwise(*sides, "2xcpu", [("a.py:1", "at 0.44")])[0]


NOT_FINITE = """
import torch, meshwise as mw
from torch.ao.quantization import MinMaxObserver
from torch.utils.data import DataLoader, TensorDataset
torch.manual_seed(0)
x = torch.randn(24, 3)
model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 2))
model.seen = MinMaxObserver()
model, optimizer, loader = mw.distribute(
    model, torch.optim.AdamW(model.parameters(), 0.1), DataLoader(TensorDataset(x, x[:, :2]), batch_size=4), view="rank"
)
model.forward = lambda x: model[2](model[1](model[0](x)))
for step, (a, b) in enumerate(loader):
    mw.backward((model(a) - b).square().mean() * (float("nan") if step == SPOILT else 1.0))
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.mark.parametrize(("spoilt", "says"), [("9", []), ("1", ["nothing is proven from step 2 on: the loss is not"])])
def test_losses_that_are_no_number_on_both_sides_are_equal_and_prove_nothing(
    spoilt: str, says: list[str], pool: Any
) -> None:
    found = proof(NOT_FINITE.replace("SPOILT", spoilt), pool)
    assert found.equal, found.comparison.first
    assert {c.kind: c.faults for c in found.comparison.kinds}["buffers"] == 0, "a MinMaxObserver begins with inf"
    assert [text.removesuffix(" finite on both sides.") for text in found.not_judged] == says


def test_a_difference_is_judged(pool: Any) -> None:
    found = proof(CAST.replace("correct += mw.sum(right)", "correct += right"), pool)
    assert found.verdict is Verdict.DIFFERENT and not found.not_judged
    assert replace(found, comparison=replace(found.comparison, first=None)).verdict is Verdict.EQUAL
