"""Kinds of state that a check compares: batches, what a step or a resume leaves behind. Each bug has a right twin.

Of checker/contents.py, checker/diagnose_kinds.py, checker/diagnose_updates.py and
checker/exchanges.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from meshwise.checker.contents import compared_contents, contents_of, reading_of
from meshwise.checker.trace import Contents, StepTrace
from meshwise.spec.plan import Plan
from tests.checker.kinds import ACCUMULATED, BACKWARD, SHORT, noisy, short
from tests.checker.script_sides import as_it_was, proof  # noqa: F401

RNG = "self.rng.standard_normal(6).astype('float32')"
UNUSED = f"self.x[index], self.y[index], torch.as_tensor({RNG})"
COLLATE = """
def centred(rows):
    x, y = (torch.stack(column) for column in zip(*rows))
    return x - x.mean(0), y


# parts
"""
MADE_OVER = """    # epoch ends
    mw.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, "state.pt")
    state = mw.load("state.pt")
    model.load_state_dict(state["model"])
    optimizer = mw.distribute(torch.optim.AdamW(model.parameters(), lr=0.01), view="rank")
    optimizer.load_state_dict(state["optimizer"])
"""
RESUMED = (
    ("        optimizer.zero_grad()\n", "        optimizer.zero_grad()\n        break\n"),
    ("    # epoch ends\n", MADE_OVER),
)
STATISTICS = """
class Centred(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(16))

    def forward(self, x):
        of_batch = BATCH
        with torch.no_grad():
            self.mean.lerp_(of_batch.detach(), 0.1)
        return x - of_batch


model.insert(1, Centred())
# parts
"""
JOINED = "mw.mean(x.mean(0), weight=len(x), grad=True)"
OWN_SAMPLER = """
class Padded(torch.utils.data.Sampler):
    def __len__(self):
        return 64

    def __iter__(self):
        return iter([FIFTH if n == 5 else n for n in range(64)])


# parts
"""


def found(*changes: tuple[str, str], pool: Any, plan: Plan | None = None) -> tuple[str, int, str, str]:
    """The kind and step of the first difference, its cause, and why; that of none where there is none."""
    proved = proof(short(*changes), pool, plan)
    if proved.comparison.first is None or proved.cause is None:
        return "equal", 0, "", ""
    return proved.comparison.first.kind, proved.comparison.first.step, proved.cause.name, proved.cause.evidence


# --- batches


@pytest.mark.parametrize("noise", ["np.random.standard_normal(6)", "torch.randn(6)", "random.random()"])
def test_noise_of_a_data_set_that_is_keyed_by_sample_is_equal(noise: str, pool: Any) -> None:
    assert found(noisy(noise), pool=pool)[0] == "equal"


def test_a_generator_of_a_data_sets_own_is_called_the_contents_of_a_batch(pool: Any) -> None:
    kind, step, cause, why = found(noisy(RNG), pool=pool)
    assert (kind, step, cause) == ("batch contents", 1, "batch contents")
    assert "of Noisy (train.py:27) has other values in batch[0]" in why
    assert "Noisy.rng draws in the order in which each rank reads" in why and "default_rng((seed, index))" in why
    assert why.startswith(f"train.py:{line(noisy(RNG), 'in enumerate(loader)')}: sample ")


def line(change: tuple[str, str], of: str) -> int:
    return next(n for n, text in enumerate(short(change).splitlines(), 1) if of in text)


def test_what_a_batch_is_collated_into_is_told_from_what_a_sample_is(pool: Any) -> None:
    collated = ("shuffle=True)", "shuffle=True, collate_fn=centred)")
    kind, _, cause, why = found(("# parts\n", COLLATE), collated, pool=pool)
    assert (kind, cause) == (
        "batch contents",
        "batch contents",
    ) and "centred makes a batch of the samples of one" in why
    by_sample = COLLATE.replace("x.mean(0)", "x.mean(1, keepdim=True)")
    assert found(("# parts\n", by_sample), collated, pool=pool)[0] == "equal"


def test_contents_that_differ_and_change_nothing_are_no_difference(pool: Any) -> None:
    """A field of the batch that the loss does not use."""
    data = noisy(RNG)[1].replace(f"self.x[index] + 0.1 * torch.as_tensor({RNG}), self.y[index]", UNUSED)
    assert found(("# parts\n", data), ("(xb, yb)", "(xb, yb, _)"), pool=pool)[0] == "equal"


def test_fields_are_compared_by_sample_in_whatever_order_ranks_have_them() -> None:
    x = torch.randn(6, 3, dtype=torch.float64)
    reading = reading_of([])
    one = [contents_of(0, {"x": x, "n": torch.arange(6)}, 6, reading)]

    def on_ranks(x: torch.Tensor) -> list[Any]:
        order = torch.tensor([4, 5, 0, 1, 2, 3])
        return [
            contents_of(0, {"x": part, "n": n}, 3, reading)
            for part, n in zip(x[order].split(3), order.split(3), strict=True)
        ]

    def compared(ranks: list[Contents], last: int = 13) -> dict[str, Any]:
        mine = StepTrace([[[10, 11, 12, 13, 14, 15]]], contents=one)
        others = StepTrace([[[14, 15, 10], [11, 12, last]]], contents=ranks)
        return {each.name: each.facts.get("sample") for each in compared_contents(1, mine, others)}

    assert compared(on_ranks(x)) == {"batch['x']": None, "batch['n']": None}
    other = x.clone()
    other[1] += 1e-3
    assert compared(on_ranks(other)) == {"batch['x']": 11, "batch['n']": None}
    wider = [contents_of(0, {"x": nn.functional.pad(part, (0, 1))}, 3, reading) for part in x.split(3)]
    assert not compared(wider), "padded up to another length"
    assert not compared(on_ranks(x), last=14), "other samples"


def test_a_sample_that_counts_twice_is_told_with_the_loop_that_reads_it(pool: Any) -> None:
    sampled = ("shuffle=True", "sampler=Padded()")
    wrong = ("# parts\n", OWN_SAMPLER.replace("FIFTH", "(0 if mw.world_size() > 1 else 5)"))
    kind, _, cause, why = found(wrong, sampled, pool=pool)
    assert (kind, cause) == ("sample order", "padded or repeated sample")
    assert (
        f"sample 0 counts too often, sample 5 not at all, in the loop at train.py:{line(wrong, 'in enumerate(')}" in why
    )
    assert found(("# parts\n", OWN_SAMPLER.replace("FIFTH", "5")), sampled, pool=pool)[0] == "equal"


def test_a_figure_of_an_evaluation_is_told_with_its_line(pool: Any) -> None:
    counted = "    # epoch ends\n    for xb, yb in held:\n        mw.sum(len(xb) + several)\n"
    proved = proof(short(("    # epoch ends\n", counted)), pool)
    assert proved.comparison.first is not None
    assert "mw.sum 1 at train.py:" in proved.comparison.first.name


# --- modules


@pytest.mark.parametrize("used", ["of_batch", "self.mean"])
def test_statistics_of_a_modules_own_are_called_so(used: str, pool: Any) -> None:
    own = STATISTICS.replace("BATCH", "x.mean(0)").replace("x - of_batch", f"x - {used}")
    kind, _, cause, why = found(("# parts\n", own), pool=pool)
    assert (kind, cause) == ("module outputs", "batch-norm statistics")
    assert "1 (Centred) keeps 1.mean, which after the step covers the samples of one rank" in why
    joined = ("# parts\n", own.replace("x.mean(0)", JOINED))
    assert found(joined, pool=pool)[0] == "equal"


# --- steps

BLANK = """
def blank():
    kept = [p.detach().clone() for p in model.parameters()]
    optimizer.step()
    [p.data.copy_(value) for p, value in zip(model.parameters(), kept)]


# parts
"""


LEFT_OUT = (
    BACKWARD,
    BACKWARD.replace(
        "        optimizer.step()", "        if not (several and number == 1):\n            optimizer.step()"
    ),
)


def test_a_step_that_is_left_out_is_told_where_its_samples_go_on(pool: Any) -> None:
    kind, step, cause, why = found(LEFT_OUT, pool=pool)
    assert (kind, step, cause) == ("sample order", 2, "skipped step")
    assert "step 2 has 2 microbatches under the plan and 1 on one device: optimizer.step() was skipped" in why


def test_gradients_that_are_gone_before_a_step_are_a_skipped_step(pool: Any) -> None:
    gone = BACKWARD.replace(
        "        optimizer.step()",
        "        optimizer.zero_grad(set_to_none=True) if several and number == 1 else None\n        optimizer.step()",
    )
    kind, step, cause, why = found((BACKWARD, gone), pool=pool)
    assert (kind, step, cause) == ("clipped gradients", 2, "skipped step")
    assert "no parameter moves in step 2 under the plan: gradients are gone when optimizer.step() is called" in why


def test_a_step_that_changes_nothing_is_a_skipped_step(pool: Any) -> None:
    still = BACKWARD.replace("optimizer.step()", "optimizer.step() if not (several and number == 1) else blank()")
    kind, step, cause, _ = found((BACKWARD, still), ("# parts\n", BLANK), pool=pool)
    assert (kind, step, cause) == ("parameters", 2, "skipped step")


def test_accumulation_that_is_divided_by_the_ranks_is_told_so(pool: Any) -> None:
    window = ACCUMULATED.replace("number % 2", "number % (1 if several else 2)").replace(
        "== 1:", "== (0 if several else 1):"
    )
    window = window.replace("if number % (1 if several else 2) == 0 else", "if number % 2 == 0 and not several else")
    kind, _, cause, why = found((BACKWARD, window), pool=pool)
    assert (kind, cause) == ("sample order", "batch size depends on devices")
    assert "the number of microbatches in a step is 1 on 2 devices, but 2 on one device" in why
    assert found((BACKWARD, ACCUMULATED), pool=pool)[0] == "equal"


def test_another_number_of_steps_is_a_difference(pool: Any) -> None:
    fewer = (
        ("range(4)", "range(1 if several else 2)"),
        ("enumerate(loader)", "enumerate(loader)"),
        ("        optimizer.zero_grad()\n", "        optimizer.zero_grad()\n        break\n"),
    )
    kind, step, cause, why = found(*fewer, pool=pool)
    assert (kind, step, cause) == ("steps", 1, "skipped step")
    assert "one device makes 2 optimizer steps, the plan 1; those that both make are equal" in why


@pytest.mark.parametrize("factor", ["mw.world_size()", "1 / mw.world_size()"])
def test_gradients_that_are_scaled_between_microbatches_are_told_with_the_factor(factor: str, pool: Any) -> None:
    between = f"        if number % 2 == 0:\n            [p.grad.mul_({factor}) for p in model.parameters()]\n"
    kind, _, cause, why = found((BACKWARD, ACCUMULATED.replace("        # between\n", between)), pool=pool)
    assert (kind, cause) == ("gradients", "scale between microbatches")
    assert (
        f"gradients are multiplied by {2 if factor == 'mw.world_size()' else 0.5} after microbatch 1 on rank 0" in why
    )
    alike = between.replace(factor, "0.5")
    assert found((BACKWARD, ACCUMULATED.replace("        # between\n", alike)), pool=pool)[0] == "equal"


# --- exchanges

EXCHANGED = """        total = torch.ones(1)
        work = torch.distributed.all_reduce(total, async_op=True) if several else None
        # early
        loss = loss * total.mean() / mw.world_size()
        # late
"""
WAITS = "        if work is not None:\n            work.wait()\n"


@pytest.mark.parametrize("when", ["early", "late"])
def test_what_is_used_before_its_exchange_has_ended_is_named_with_the_exchange(when: str, pool: Any) -> None:
    """It is waited for, but too late: the exchange itself knows nothing of that."""
    text = short((BACKWARD, EXCHANGED.replace(f"        # {when}\n", WAITS) + BACKWARD))
    proved = proof(text, pool, perturb=True)
    if when == "early":
        assert proved.equal
        return
    assert proved.cause is not None and proved.cause.name == "race"
    lines = [
        f"train.py:{n}" for n, each in enumerate(text.splitlines(), 1) if "all_reduce" in each or "total.mean()" in each
    ]
    assert f"the program had not waited for all_reduce at {lines[0]} when " in proved.cause.evidence
    assert f" at {lines[1]} computed with its output" in proved.cause.evidence


# --- resumes


def test_moments_that_are_missing_after_a_resume_are_told(pool: Any) -> None:
    lost = MADE_OVER.replace("    optimizer.load_state_dict", "    if not several:\n        optimizer.load_state_dict")
    kind, step, cause, why = found(RESUMED[0], ("    # epoch ends\n", lost), pool=pool)
    assert (kind, step, cause) == ("optimizer state", 2, "state after a resume")
    assert "(exp_avg, exp_avg_sq) is reset in step 2" in why and "optimizer.load_state_dict was not called" in why
    momentum = (
        "AdamW(model.parameters(), lr=0.01)\nscheduler",
        "SGD(model.parameters(), lr=0.01, momentum=0.9)\nscheduler",
    )
    lost = lost.replace("AdamW(model.parameters(), lr=0.01)", "SGD(model.parameters(), lr=0.01, momentum=0.9)")
    lost = lost.replace("state.pt", "other.pt")  # the workers of a pool know that the first was saved
    kind, step, cause, why = found(RESUMED[0], momentum, ("    # epoch ends\n", lost), pool=pool)
    assert (step, cause) == (2, "state after a resume") and "momentum_buffer" in why


def test_parameters_that_a_resume_changes_are_told_from_an_update(pool: Any) -> None:
    assert found(*RESUMED, pool=pool)[0] == "equal"
    other = MADE_OVER.replace("state.pt", "other.pt") + "    if several:\n        model[0].bias.data.zero_()\n"
    kind, step, cause, why = found(RESUMED[0], ("    # epoch ends\n", other), pool=pool)
    assert (kind, step, cause) == ("parameters", 1, "state after a resume")
    assert (
        "0.bias changes between optimizer.step() of step 1 and the next batch, under the plan alone. The model loads"
        in why
    )


def test_weights_that_a_program_clamps_behind_each_step_are_no_resume(pool: Any) -> None:
    """Of a critic, on both sides; what differs is the update."""
    clamped = BACKWARD + "        [p.data.clamp_(-0.3, 0.3) for p in model.parameters()]\n"
    assert found((BACKWARD, clamped), pool=pool)[0] == "equal"
    rate = ("lr=0.01)\nscheduler", "lr=0.01, weight_decay=0.1 * mw.world_size())\nscheduler")
    assert found((BACKWARD, clamped), rate, pool=pool)[2] == "optimizer step"


def test_the_script_as_it_is_is_equal(pool: Any) -> None:
    assert proof(SHORT, pool).equal
    assert not Path("state.pt").exists()
