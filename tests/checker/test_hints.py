"""What is wrong on one device too is told as a warning, with its line; a program that does it rightly hears nothing.

Of checker/per_rank.py too.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from torch import nn

from meshwise.training.process.session import end_sessions
from tests.checker.kinds import ACCUMULATED, BACKWARD, SHORT, short
from tests.checker.script_sides import ALONE, as_it_was, proof, watched  # noqa: F401
from tests.checker.scripts import SCRIPT


def hints(text: str) -> list[str]:
    """What one device hears."""
    end_sessions()
    Path("train.py").write_text(text)
    found = watched("train.py", [], ALONE, None, ".", None)
    assert found.trace is not None and len(found.trace.steps) >= ALONE.steps
    told: list[str] = found.trace.hints
    return told


def at(text: str, of: str) -> str:
    (number,) = [n for n, line in enumerate(text.splitlines(), 1) if of in line]
    return f"train.py:{number}: "


def test_scripts_that_are_right_hear_nothing() -> None:
    assert hints(SHORT) == [] and hints(SCRIPT) == []


DROPS = ("nn.Tanh()", "nn.Tanh(), nn.Dropout(0.2)")
EVALUATION = """    # epoch ends
    with torch.no_grad():
        for xb, yb in held:
            right = mw.sum((model(xb).argmax(1) == yb).sum().item())
"""


def test_dropout_in_an_evaluation() -> None:
    text = short(DROPS, ("    # epoch ends\n", EVALUATION))
    (told,) = hints(text)
    assert told.startswith(at(text, "argmax") + "dropout is active in an evaluation (2): call model.eval()")
    evaluated = EVALUATION.replace("    with", "    model.eval()\n    with") + "    model.train()\n"
    assert hints(short(DROPS, ("    # epoch ends\n", evaluated))) == []
    whole = short(
        DROPS, ("    # epoch ends\n", "    with torch.no_grad():\n        right = (model(x[:5]) > 0).sum()\n")
    )
    (told,) = hints(whole)
    assert told.startswith(at(whole, "x[:5]"))


def test_dropout_without_gradients_in_a_loop_that_trains_is_no_evaluation() -> None:
    """A teacher, or samples that are drawn from the model itself."""
    teacher = ("        loss = nn", "        with torch.no_grad():\n            soft = model(xb)\n        loss = nn")
    assert hints(short(DROPS, teacher)) == []


def test_statistics_that_are_made_anew_run_in_training_mode() -> None:
    normed = ("nn.Tanh()", "nn.BatchNorm1d(16), nn.Dropout(0.1)")
    update = "    # epoch ends\n    torch.optim.swa_utils.update_bn([x[:8], x[8:16]], model)\n"
    assert hints(short(normed, ("    # epoch ends\n", update))) == []


INSIDE = ("        loss = nn", "        optimizer.zero_grad()\n        loss = nn")


def test_gradients_that_are_set_to_zero_inside_accumulation() -> None:
    assert hints(short((BACKWARD, ACCUMULATED))) == []
    text = short((BACKWARD, ACCUMULATED.replace("            optimizer.zero_grad()\n", "")), INSIDE)
    (told,) = hints(text)
    assert told.startswith(at(text, "optimizer.zero_grad()") + "gradients are set to zero between the 2 backwards of a")
    assert hints(short((BACKWARD, BACKWARD.replace("        optimizer.zero_grad()\n", "")), INSIDE)) == []


def test_gradients_of_tasks_that_are_combined_by_hand_are_not_thrown_away() -> None:
    apart = """        parts = []
        for task in (loss, 0.1 * loss ** 2):
            optimizer.zero_grad()
            mw.backward(task, retain_graph=True) if False else mw.backward(nn.functional.cross_entropy(model(xb), yb))
            parts.append([p.grad.clone() for p in model.parameters()])
        for p, *grads in zip(model.parameters(), *parts):
            p.grad = sum(grads) + 0.01
        optimizer.step()
        optimizer.zero_grad()
"""
    assert hints(short((BACKWARD, apart))) == []


def test_a_step_that_looks_ahead_sets_gradients_to_zero_rightly() -> None:
    """Sharpness-aware minimization: a second backward, at other weights."""
    ahead = """        mw.backward(loss)
        with torch.no_grad():
            moves = [0.05 * p.grad for p in model.parameters()]
            [p.add_(move) for p, move in zip(model.parameters(), moves)]
        optimizer.zero_grad()
        mw.backward(nn.functional.cross_entropy(model(xb), yb))
        with torch.no_grad():
            [p.sub_(move) for p, move in zip(model.parameters(), moves)]
        optimizer.step()
        optimizer.zero_grad()
"""
    assert hints(short((BACKWARD, ahead))) == []


@pytest.mark.filterwarnings("ignore:Detected call")
def test_a_scheduler_that_ticks_each_microbatch() -> None:
    text = short((BACKWARD, ACCUMULATED + "        scheduler.step()\n"))
    (told,) = hints(text)
    assert told.startswith(
        at(text, "scheduler.step()") + "the scheduler steps after every backward, and a step has 2 of them"
    )
    assert hints(short((BACKWARD, ACCUMULATED + "            scheduler.step()\n"))) == []
    assert hints(short((BACKWARD, BACKWARD + "        scheduler.step()\n"))) == [], "a tick a step"


def test_two_optimizers_that_take_turns_hear_nothing() -> None:
    """As a generator and its critic do."""
    critic = "critic = nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Linear(8, 1))\n# parts\n"
    other = "torch.optim.Adam(critic.parameters(), lr=0.01)\nmodel, optimizer, scheduler, loader, held = mw.distribute("
    turns = """        judge.zero_grad()
        mw.backward((critic(nn.functional.one_hot(yb, 2).to(xb)) - 1).square().mean())
        mw.backward(critic(model(xb).detach()).square().mean())
        judge.step()
        ticking.step()
        optimizer.zero_grad()
        mw.backward((critic(model(xb)) - 1).square().mean())
        optimizer.step()
        scheduler.step()
"""
    changes = (
        ("# parts\n", critic),
        ("model, optimizer, scheduler, loader, held = mw.distribute(", f"judge = {other}"),
        (' held, view="rank")\n', ' held, view="rank")\njudge = mw.distribute(judge, critic, view="rank")[0]\n'
         "ticking = torch.optim.lr_scheduler.StepLR(judge, 5)\n"),
        (BACKWARD, turns),
    )  # fmt: skip
    assert hints(short(*changes)) == []


def test_two_optimizers_that_step_together_may_let_go_of_gradients_of_each_other() -> None:
    """A critic's gradients of the generator's loss."""
    together = """        scheduler.optimizer.zero_grad()
        mw.backward(loss)
        last.zero_grad()
        mw.backward(nn.functional.cross_entropy(model(xb), yb))
        optimizer.step()
        last.zero_grad()
"""
    last = ("several = ", "last = model[2]\nseveral = ")
    assert hints(short((BACKWARD, together), last)) == []


@pytest.mark.filterwarnings("ignore:Detected call")
def test_a_hint_is_a_warning_and_no_difference(pool: Any) -> None:
    found = proof(short((BACKWARD, ACCUMULATED + "        scheduler.step()\n")), pool)
    assert found.equal and not found.not_judged and len(found.warnings) == 1


def test_classes_are_as_they_were() -> None:
    zero, hints_before = nn.Module.zero_grad, hints(SHORT)
    assert nn.Module.zero_grad is zero and hints_before == []
