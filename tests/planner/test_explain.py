"""What a step is made of: the parts add up, and what limits it has a name.

Of planner/views/explain_text.py too.
"""

import pytest
from planner.works import FREE, Given, computes, gathers, work

from meshwise.hardware.machines import find_machine
from meshwise.planner.estimate import Estimate, MemoryEstimate, Range
from meshwise.planner.estimator import rehearser
from meshwise.planner.explain import LAUNCHES, explain, link_words
from meshwise.planner.simulate import simulate
from meshwise.planner.views.explain_text import explain_lines, runner_up_sentences
from meshwise.spec.plan import Plan
from meshwise.training.jobs.registry import find_job


def estimate(seconds, parts=None, memory=50.0, plan=None, capacity=100):
    room = MemoryEstimate(0, Range(memory, memory, memory), 0, {}, 0, 0, capacity)
    return Estimate(plan or Plan(), room, Range(seconds, seconds, seconds), parts or {})


def explained(*events, words="8xH100", **given):
    prices = Given(words=words, **given)
    step = simulate([work(*events)], prices, overlap=FREE)
    return explain(estimate(step.seconds), step, prices)


def text(found, width=200):
    return "\n".join(str(line) for line in explain_lines(found, width))


def test_an_exposed_collective_is_the_link_s():
    found = explained(
        computes(phase="forward"),
        gathers((0, 1), phase="forward", kind="all-reduce"),
        computes(phase="backward", after=(1,)),
        seconds={"all-reduce": 5.0},
    )
    assert found.limits == {"NVLink4 x18": pytest.approx(4.0), "compute": pytest.approx(2.0)}
    assert found.time.hidden == pytest.approx(1.0)
    told = text(found)
    assert "What limits it: the link (NVLink4 x18)" in told
    assert "Communication: 4.0 s exposed, 1.0 s hidden under computing." in told
    assert [(one.what, one.times, one.origin) for one in found.collectives] == [("all-reduce of 2 ranks", 1, "model")]


def test_a_host_that_launches_slowly_is_the_limit():
    found = explained(*[computes(phase="forward")] * 4, launch=3.0)
    assert next(iter(found.limits)) == LAUNCHES
    assert "What limits it: the host" in text(found)
    assert [(one.what, one.times, one.seconds) for one in found.operators] == [("mm 1×1 fp32", 4, 4.0)]


def test_links_are_named_by_their_slowest():
    machine = find_machine("2x8xA100-80GB@200Gb")
    assert link_words(machine, (0, 1)) == "NVLink3 x12"
    assert link_words(machine, (0, 8)) == "network"


def test_the_runner_up_is_behind_for_a_reason():
    best = estimate(1.0, {"computing": 0.7, "launches": 0.3})
    other = estimate(1.5, {"computing": 0.5, "launches": 0.3, "communication": 0.7}, 60.0, Plan(data=2))
    said = runner_up_sentences(best, other)[1]
    assert said == "Why not data=2: 500 ms longer (communication +700 ms, computing -200 ms), 10 B more memory."
    large = runner_up_sentences(best, estimate(0.5, memory=200.0, plan=Plan(data=2)))[1]
    assert large == "Why not data=2: does not fit, 150 B more memory."
    assert runner_up_sentences(best, None) == []


def test_a_real_step_is_explained_to_its_end():
    whole = rehearser(find_job("mnist-cnn"), find_machine("2xA100"))(Plan(data=2))
    found = explain(whole.estimate, whole.step, whole.prices)
    assert sum(found.limits.values()) == pytest.approx(whole.estimate.seconds.value)
    assert found.collectives[0].what == "all-reduce fp32 of 2 ranks" and found.collectives[0].rate > 0
    assert any("convolution" in one.what for one in found.operators)
    narrow = text(found, 60).splitlines()
    table = [line for line in narrow if "fp32" in line]
    assert table and max(map(len, table)) <= 60
