"""What a plan takes at least, known before it is rehearsed."""

import functools

import pytest
import torch
from torch import nn

from meshwise.hardware.words import machine_from_words
from meshwise.planner.estimator import rehearser
from meshwise.planner.search import Bounds
from meshwise.planner.tracer import Tracer
from meshwise.spec.plan import Plan
from meshwise.training.job.job import Job

PARAMETERS = 4 * 1024 * 1024
STEP = 3 * 2 * 64 * 1024 * 1024
"""Multiplications and additions of a step, but for what the first layer's input would need."""


def job():
    return Job(
        name="wide",
        model=lambda: nn.Sequential(nn.Linear(1024, 1024, bias=False)),
        loss=lambda model, batch: model(batch[0]).square().mean(),
        optimizer=functools.partial(torch.optim.AdamW, lr=0.1),
        data=(torch.zeros(128, 1024),),
        batch_size=64,
    )


def bounds(cap=None):
    program, machine = Tracer(job()), machine_from_words("2xH100")
    found = Bounds(program.model, machine, cap)
    return found, rehearser(program, machine, cap)


def test_gradients_count_at_once_and_the_state_once_it_is_known():
    found, rehearse = bounds(cap=int(3.5 * PARAMETERS))
    assert not found.too_large(Plan())  # parameters and gradients
    found.learn(rehearse(Plan()))
    assert "14.0 MiB" in found.too_large(Plan())
    for plan in (Plan(shard=2), Plan(data=2, zero1=True), Plan(offload=("optimizer",))):
        assert not found.too_large(plan)


def test_the_least_time_is_that_of_the_operations_with_the_bubble_of_a_pipeline():
    found, rehearse = bounds()
    assert found.seconds(Plan()) == 0.0
    found.learn(rehearse(Plan(data=2)))
    peak = max(machine_from_words("1xH100").devices[0].peak[word] for word in ("bf16", "fp16", "tf32"))
    assert found.seconds(Plan()) == pytest.approx(STEP * 2 / 3 / peak)
    assert found.seconds(Plan(data=2)) == pytest.approx(found.seconds(Plan()) / 2)
    staged = Plan(pipeline=2, accumulate=2)
    assert found.seconds(staged) == pytest.approx(found.seconds(Plan(data=2)) * 1.5)
    measured = rehearse(Plan()).estimate.seconds
    assert measured is not None and found.seconds(Plan()) < measured.value
