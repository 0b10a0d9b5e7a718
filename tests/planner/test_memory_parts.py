"""What memory goes to: each byte of the peak is in a category, in a sort of tensors, and in a phase.

Of planner/views/explain_text.py too.
"""

from planner.works import computes, work

from meshwise.hardware.machines import find_machine
from meshwise.planner.estimator import rehearser
from meshwise.planner.memory import BEFORE, Tensors, memory_parts
from meshwise.planner.views.explain_text import memory_lines
from meshwise.planner.work import Allocate, Free, Work
from meshwise.spec.plan import Plan
from meshwise.training.jobs.registry import find_job

DEVICE = find_machine("1xH100").devices[0]
KIB = 1024


def of(*events, held=()):
    step = Work(0, 1, "cpu", tuple(held), work(*events).events)
    return memory_parts(Work(0, 1, "cpu", (), ()), step, DEVICE)


def test_tensors_that_are_alike_are_told_together_with_what_made_them():
    found = of(
        Allocate(1, 4 * KIB, "activations"),
        computes(phase="forward"),
        Allocate(2, 4 * KIB, "activations"),
        computes(phase="forward"),
        Allocate(3, 6 * KIB, "temporary"),
        computes("aten.mul", phase="backward"),
        Free(1),
        Free(3),
        held=[Allocate(0, 2 * KIB, "parameters")],
    )
    assert found.peak.bytes == 16 * KIB and not found.first
    assert found.phases == {
        BEFORE: {"parameters": 2 * KIB},
        "forward": {"parameters": 2 * KIB, "activations": 8 * KIB},
        "backward": {"parameters": 2 * KIB, "activations": 8 * KIB, "temporary": 6 * KIB},
    }
    assert found.largest == (
        Tensors("activations", 4 * KIB, 2, "mm 1×1 fp32", "forward"),
        Tensors("temporary", 6 * KIB, 1, "mul 1×1 fp32", "backward"),
        Tensors("parameters", 2 * KIB, 1),
    )
    assert not found.outside and not found.host
    text = "\n".join(map(str, memory_lines(found, 200)))
    assert "16.0 KiB at the peak of a step, in backward" in text
    assert "activations        2  4.0 KiB   8.0 KiB   50 %  mm 1×1 fp32, forward" in text


def test_the_parts_of_a_real_plan_are_those_of_its_estimate():
    whole = rehearser(find_job("mnist-mlp"), find_machine("1xH100"))(Plan())
    found = memory_parts(whole.traces[0].first, whole.traces[0].step, DEVICE)
    memory = whole.estimate.memory
    assert found.peak.bytes == memory.allocated and found.peak.split == memory.categories
    assert memory.allocated + sum(found.outside.values()) == memory.total.value
    assert found.outside["held by the allocator"] == memory.reserved - memory.allocated
    assert found.largest[0].times * found.largest[0].size <= memory.allocated
