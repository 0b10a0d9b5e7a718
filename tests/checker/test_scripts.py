"""`meshwise check script.py`: a script that is right is equal under every plan; one that is wrong is told why."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from meshwise.checker.trace import trace_to_compare
from meshwise.spec.errors import UsageError
from meshwise.spec.plan import Plan
from meshwise.training.process.session import end_sessions
from tests.checker.script_sides import ALONE, STEPS, as_it_was, proof, sides, watched  # noqa: F401
from tests.checker.scripts import SCRIPT, wrong
from tests.pool import CaseFailed

PLANS = {
    "replicas": None,
    "shard": Plan(shard=2),
    "zero1 and recompute": Plan(data=2, zero1=True, recompute="full"),
    "bf16": Plan(shard=2, precision="bf16", recompute="selective"),
}


@pytest.mark.parametrize("name", [pytest.param(p, marks=[pytest.mark.slow] * (n % 2)) for n, p in enumerate(PLANS)])
def test_a_script_that_is_right_is_equal_under_every_plan(name: str, pool: Any) -> None:
    found = proof(SCRIPT, pool, PLANS[name])
    assert found.equal, found.comparison.first
    kinds = {compared.kind: compared for compared in found.comparison.kinds}
    assert found.batches == (8, 8, 5, 8, 8)
    assert {"module outputs", "gradients", "clipped gradients", "optimizer state", "buffers"} < set(kinds)
    assert kinds["scheduler"].count >= len(found.batches), "the scheduler is compared after each step"
    assert kinds["evaluation"].count == 6, "three batches of two epochs"
    assert not any(text.startswith("draws") for text in found.comparison.left_out)
    assert not Path("state.pt").exists(), "a check writes over nobody's files"


@pytest.mark.slow
def test_unequal_shares_and_more_ranks(pool: Any) -> None:
    assert proof(SCRIPT, pool, Plan(data=3), size=3).equal


def test_accumulated_batches_make_one_step(pool: Any) -> None:
    text = SCRIPT.replace("for x, y in loader:", "for number, (x, y) in enumerate(loader):")
    text = text.replace("        mw.backward(loss", "        if number % 2 == 0:\n            with mw.accumulate():\n"
                        "                mw.backward(loss, weight=torch.tensor([0.4, 0.6])[y].sum())\n"
                        "            continue\n        mw.backward(loss")  # fmt: skip
    found = proof(text, pool, Plan(shard=2))
    assert found.equal, found.comparison.first
    assert found.batches == (16, 16, 13, 16, 16)


WINDOW = """
import torch, meshwise as mw
from torch.utils.data import DataLoader, TensorDataset
torch.manual_seed(0)
x = torch.randn(24, 3)
class Scaled(torch.autograd.Function):
    forward = staticmethod(lambda ctx, x: x * 1)
    backward = staticmethod(lambda ctx, g: g * (1 + BY))
model = torch.nn.Linear(3, 2)
model, optimizer, loader = mw.distribute(
    model, torch.optim.SGD(model.parameters(), 0.1), DataLoader(TensorDataset(x, x[:, :2]), batch_size=4), view="rank"
)
for number, (a, b) in enumerate(loader):
    with mw.accumulate():
        mw.backward((Scaled.apply(model(a)) - b).square().mean() / 2)
    if number % 2:
        optimizer.step()
        optimizer.zero_grad()
"""


def test_gradients_of_a_window_are_compared_at_its_step(pool: Any) -> None:
    """No backward reduces them. A wrong one was taken for one that is clipped."""
    found = proof(WINDOW.replace("BY", "0"), pool)
    kinds = {compared.kind: compared for compared in found.comparison.kinds}
    assert found.equal and kinds["gradients"].count == 6
    assert kinds["gradient norm"].largest.facts["one device"] > 0
    wrong = proof(WINDOW.replace("BY", "mw.rank()"), pool)
    assert wrong.comparison.first is not None and wrong.comparison.first.kind == "gradients"


def test_a_script_may_leave_the_process_group_at_its_end(pool: Any) -> None:
    """As accelerator.end_training() does. The ranks had no group then to gather in what they had traced."""
    leaves = "if torch.distributed.is_initialized():\n    torch.distributed.destroy_process_group()\n"
    assert proof(WINDOW.replace("BY", "0") + leaves, pool).equal


FOUND = {
    "evaluation of one share": ("evaluation", "evaluation without mw.sum"),
    "mean over the rank's own samples": ("loss", "loss weighting"),
    "divided by the rank's own count": ("loss", "loss weighting"),
    "learning rate times ranks": ("learning rate", "learning rate times devices"),
    "a seed for each rank": ("model inputs", "batch contents"),
    "a scheduler for each rank": ("scheduler", "scheduler ticks twice"),
    "weights changed on one rank": ("parameters", "optimizer step"),
    "a loader not given": ("evaluation", "loader without mw.distribute"),
}
"""Mistakes of a user that run without an error: the first difference, and its cause."""


@pytest.mark.parametrize("name", [pytest.param(f, marks=[pytest.mark.slow] * (n % 2)) for n, f in enumerate(FOUND)])
def test_what_a_user_gets_wrong_is_found(name: str, pool: Any) -> None:
    found = proof(wrong(name), pool)
    first = found.comparison.first
    assert first is not None and found.cause is not None
    assert (first.kind, found.cause.name) == FOUND[name], (first, found.cause)


def test_a_sum_that_is_taken_for_a_mean_is_refused_as_in_a_run_and_one_that_is_said_is_equal(pool: Any) -> None:
    text = SCRIPT.replace("nn.CrossEntropyLoss(weight", "nn.CrossEntropyLoss(reduction='sum', weight")
    weight = ", weight=torch.tensor([0.4, 0.6])[y].sum())"
    assert text.count(weight) == 1
    with pytest.raises(CaseFailed, match="this loss is a sum over samples"):
        proof(text.replace(weight, ")"), pool)
    assert proof(text.replace(weight, ", reduction='sum')"), pool).equal


PADDED = """
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
import meshwise as mw

class Reader(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 1)
        self.head = nn.Linear(8, 1)

    def forward(self, words, padding):
        return self.head(self.blocks(words, src_key_padding_mask=padding)[:, 0])[:, 0]

padding = (torch.arange(5) >= 3).expand(24, 5)
data = TensorDataset(torch.randn(24, 5, 8), padding, torch.randn(24))
model = Reader()
optimizer = torch.optim.SGD(model.parameters(), 0.1)
loaders = DataLoader(data, 8, shuffle=True), DataLoader(data, 8)
model, optimizer, loader, validation = mw.distribute(model, optimizer, *loaders, view="rank")
for words, padding, y in loader:
    mw.backward((model(words, padding) - y).square().mean())
    optimizer.step()
    optimizer.zero_grad()
model.eval()
total = 0.0
with torch.no_grad():
    for words, padding, y in validation:
        total += float((model(words, padding) - y).square().sum())
mw.sum(total)
"""


def test_a_transformer_that_evaluates_padded_batches_is_compared(pool: Any) -> None:
    """torch packs them into nested tensors then, whose sizes a check could not read."""
    assert proof(PADDED, pool).equal
    assert torch.backends.mha.get_fastpath_enabled()


def test_each_side_of_a_script_is_run_in_the_precision_of_the_plan_too(pool: Any) -> None:
    found = proof(SCRIPT, pool, Plan(shard=2, precision="bf16"), rounding=True)
    assert found.equal
    rounding = {each.kind: each for each in found.rounding}
    assert {"loss", "gradients", "gradient norm", "parameters", "evaluation"} <= rounding.keys()
    for kind in ("loss", "gradient norm"):
        assert 1e-6 < rounding[kind].one_device < 0.05, "of bfloat16, not of float64, and from the same start"
        assert rounding[kind].plan <= 10 * rounding[kind].one_device


def test_a_tick_too_many_behind_an_epoch_is_found(pool: Any) -> None:
    """Behind the evaluation, where no step follows that is compared."""
    text = SCRIPT.replace("        scheduler.step()\n", "")
    right = proof(text + "    scheduler.step()\n", pool)
    assert right.equal, right.comparison.first
    found = proof(text + "    [scheduler.step() for _ in range(mw.world_size())]\n", pool)
    first = found.comparison.first
    assert first is not None and found.cause is not None
    assert (first.kind, first.step, found.cause.name) == ("scheduler", STEPS, "scheduler ticks twice")


REFUSED = {"an optimizer of another model": "none of its parameters belongs to a distributed model"}


@pytest.mark.slow
@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_stepped_is_told_by_the_script_itself(
    name: str, pool: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises((CaseFailed, UsageError), match=REFUSED[name]):
        proof(wrong(name), pool)


def test_a_plain_backward_is_refused() -> None:
    Path("train.py").write_text(wrong("plain backward"))
    with pytest.raises(UsageError, match=r"was called before any mw\.backward"):
        watched("train.py", [], ALONE, None, ".", None)


def test_an_optimizer_that_is_not_given_is_no_mistake_of_replicas(pool: Any) -> None:
    assert proof(wrong("an optimizer not given"), pool).equal


def test_scripts_that_show_nothing_are_refused_with_what_to_write() -> None:
    cases = {
        "print('hello')": "mw.distribute was given no model",
        "import torch, meshwise as mw\n"
        'mw.distribute(torch.nn.Linear(1, 1), view="rank")': "no loop ran over a distributed loader",
        "import torch, meshwise as mw\n"
        'm, l = mw.distribute(torch.nn.Linear(1, 1), torch.utils.data.DataLoader(torch.ones(4, 1)), view="rank")\n'
        "for x in l: m(x)": r"loss.backward\(\) was never called",
        "import torch, meshwise as mw\n"
        'm, l = mw.distribute(torch.nn.Linear(1, 1), torch.utils.data.DataLoader(torch.ones(4, 1)), view="rank")\n'
        "for x in l: mw.backward(m(x).mean())": "no optimizer of the model made a step after 4 backwards",
    }
    for text, says in cases.items():
        end_sessions()
        Path("train.py").write_text(text)
        seen = watched("train.py", [], ALONE, None, ".", None)
        with pytest.raises(UsageError, match=says):
            trace_to_compare(seen, "train.py")


def test_other_numbers_of_steps_are_a_difference(pool: Any) -> None:
    text = SCRIPT.replace("optimizer.step()", "optimizer.step() if len(scheduler.__dict__) and ready() else None")
    text = text.replace("# after", "calls = []\n\n\ndef ready():\n    calls.append(1)\n"
                        "    return mw.world_size() == 1 or len(calls) < 2")  # fmt: skip
    found = proof(text, pool)
    assert found.comparison.first is not None and found.cause is not None
    assert (found.comparison.first.kind, found.cause.name) == ("steps", "skipped step")
    assert "one device makes 5 optimizer steps, the plan 1" in found.cause.evidence


def test_a_script_that_saves_and_loads_within_a_run_reads_what_it_saved(pool: Any) -> None:
    text = SCRIPT + "    loaded = mw.load('state.pt')\n    model.load_state_dict(loaded['model'])\n"
    text += (
        "    optimizer.load_state_dict(loaded['optimizer'])\n    assert loaded['model']['head.bias'].shape == (2,)\n"
    )
    found = proof(text, pool, Plan(shard=2))
    assert found.equal and not Path("state.pt").exists()


@pytest.mark.slow
def test_a_script_ends_where_it_would_train_on_for_long(pool: Any) -> None:
    one, many = sides(SCRIPT, pool, None, "--epochs", "100000")
    assert one.trace is not None and len(one.trace.steps) == STEPS + 2
    assert one.backwards == many.backwards < 50


def test_floats_of_any_kind_become_float64() -> None:
    Path("train.py").write_text(SCRIPT + "\nassert loss.dtype == torch.float64, loss.dtype\n")
    seen = watched("train.py", [], ALONE, None, ".", None)
    assert seen.trace is not None and all(t.dtype == torch.float64 for t in seen.trace.initial_parameters.values())
    assert torch.get_default_dtype() == torch.float32


@pytest.mark.slow
@pytest.mark.usefixtures("capfd", "processes")
def test_the_command_says_it_with_its_exit_code(command: Callable[..., tuple[int, str, str]]) -> None:
    def run(text: str, *words: str) -> tuple[int, str]:
        Path("train.py").write_text(text)
        code, out, err = command("check", *words)
        return code, out + err

    code, said = run(SCRIPT, "--set", "shard=2", "train.py", "--epochs", "1")
    assert code == 0 and "equal: Plan(shard=2)" in said and "in fp32" in said
    code, said = run(wrong("learning rate times ranks"), "--json", "--steps", "2", "train.py")
    assert code == 1 and '"equal": false' in said
    code, said = run("1 / 0", "train.py")
    assert code == 2 and "ZeroDivisionError" in said
    code, said = run(wrong("plain backward"), "train.py")
    assert code == 2 and "mw.backward(loss) instead" in said
    code, said = run(wrong("steps of one rank"), "train.py")
    assert code == 2 and "Ranks diverged: rank 0 reached optimizer.step at" in said
    code, said = run(SCRIPT, "--set", "accumulate=2", "train.py")
    assert code == 2 and "mw.accumulate()" in said
