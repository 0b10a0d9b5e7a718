"""What a plan takes about, before it is rehearsed: it orders plans, and learns from those that were."""

import functools
from dataclasses import replace

import pytest
import torch

from meshwise.hardware.words import machine_from_words
from meshwise.planner.closed_form import ClosedForm, Kind, small_traces
from meshwise.planner.estimator import rehearser
from meshwise.planner.tracer import Tracer
from meshwise.spec.plan import Plan
from meshwise.training.job.job import Job
from meshwise.training.jobs.gpt import Gpt, GptSize, token_loss

SIZE = GptSize(8, 2048, 16, 16, 8192, vocabulary=1000)
LENGTH, MACHINE = 1024, machine_from_words("8xH100")


def job():
    tokens = torch.zeros(64, LENGTH, dtype=torch.int64)
    return Job(
        name="decoder",
        model=lambda: Gpt(SIZE),
        loss=token_loss,
        optimizer=functools.partial(torch.optim.AdamW, lr=0.1),
        data=(tokens, tokens),
        batch_size=32,
    )


@pytest.fixture(scope="module")
def likely():
    return ClosedForm(Tracer(job()).model, MACHINE, 32)


def test_a_forward_is_weighed_by_its_blocks(likely):
    forward = Tracer(job()).model.forward
    tokens = 32 * LENGTH
    weights = SIZE.layers * (4 * SIZE.width**2 + 3 * SIZE.width * SIZE.hidden) + SIZE.width * SIZE.vocabulary
    attention = SIZE.layers * 2 * tokens * LENGTH * SIZE.width  # causal: half
    assert forward.flops == pytest.approx(2 * tokens * weights + attention, rel=0.01)
    assert (forward.blocks, forward.inputs) == (8, 8 * tokens * SIZE.width * 4)
    assert forward.products < forward.kept == pytest.approx(forward.largest * 8)


def test_memory_falls_and_time_rises_with_what_saves_memory(likely):
    kept, selective, full = (likely(Plan(shard=8, recompute=how)) for how in ("none", "selective", "full"))
    assert kept.memory > selective.memory > full.memory
    assert kept.seconds < selective.seconds < full.seconds
    cut, each = (likely(Plan(shard=8, accumulate=4, reduce_each=each)) for each in (False, True))
    assert each.memory < cut.memory and each.seconds > cut.seconds
    split, along = (likely(Plan(tensor=8, sequence=along)) for along in (False, True))
    assert along.memory < split.memory


def test_what_was_rehearsed_corrects_the_guesses_of_plans_like_it():
    likely, plan = ClosedForm(Tracer(job()).model, MACHINE, 32), Plan(shard=8, recompute="full")
    before, found = likely(replace(plan, recompute="none")), rehearser(job(), MACHINE)(plan).estimate
    likely.learn(found)
    assert likely(plan).memory == pytest.approx(found.memory.total.value)
    assert likely(plan).seconds == pytest.approx(found.seconds.value)
    assert likely(replace(plan, recompute="none")) != before


CHECKED = [
    Plan(tensor=8, sequence=True, recompute="full"),
    Plan(tensor=4, data=2, recompute="selective"),
    Plan(pipeline=2, shard=4, accumulate=4),
]


@pytest.mark.slow
def test_small_traces_tell_the_time_of_the_whole_model_and_other_splits():
    program, asked = Tracer(job()), []
    small = small_traces(program, MACHINE)

    def noted(kind):
        asked.append(kind)
        return small(kind)

    likely, rehearse = ClosedForm(program.model, MACHINE, 32, noted), rehearser(program, MACHINE)
    guesses = [likely(plan) for plan in CHECKED]
    assert len(asked) == len(set(asked)) <= 6
    for plan, guess in zip(CHECKED, guesses, strict=True):
        found = rehearse(plan).estimate
        assert guess.seconds == pytest.approx(found.seconds.value, rel=0.15), plan
        assert guess.memory == pytest.approx(found.memory.total.value, rel=0.45), plan


def test_without_alike_blocks_there_are_no_small_traces():
    tokens = torch.zeros(64, 8, dtype=torch.int64)
    model = functools.partial(torch.nn.Embedding, 16, 4)
    plain = Job("plain", model, lambda model, batch: model(batch[0]).sum(), torch.optim.SGD, (tokens,), batch_size=8)
    program = Tracer(replace(plain, optimizer=functools.partial(torch.optim.SGD, lr=0.1)))
    assert small_traces(program, MACHINE)(Kind("fp32")) is None
    assert ClosedForm(program.model, MACHINE, 8, small_traces(program, MACHINE))(Plan(data=8)).seconds > 0
