"""Code that a model runs for the first time inside a call that runs apart is noticed at this call."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import meshwise as mw
from meshwise.training.process import session
from meshwise.training.whole import new_code
from tests.training.whole.running import apart, run, whole
from tests.training.whole.shared import Distribute, mlp, step, usual, weights

pytestmark = pytest.mark.skipif(sys.version_info < (3, 12), reason="sys.monitoring came with Python 3.12")


class Later(nn.Module):
    """Does something else from its sixth call on, with as many autograd nodes."""

    def __init__(self, first: int = 6, last: int = 99) -> None:
        super().__init__()
        self.body, self.calls, self.first, self.last = mlp(), 0, first, last
        self.shift = nn.Parameter(torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.later(self.body(x)) if self.first <= self.calls <= self.last else self.body(x) - self.shift

    def later(self, z: Tensor) -> Tensor:
        raise NotImplementedError


class Centred(Later):
    def later(self, z: Tensor) -> Tensor:
        return z - z.mean(0)


class Counted(Later):
    def later(self, z: Tensor) -> Tensor:
        return z / len(z)


class Scaled(Later):
    def later(self, z: Tensor) -> Tensor:
        return z / 2


class Lined(Later):
    """Has both branches in one line."""

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        z = self.body(x)
        return z - (z.mean(0) if self.first <= self.calls else self.shift)


def trained(distribute: Distribute, model: Later) -> Any:
    model, optimizer, loader = usual(distribute, model)
    losses = [step(F.cross_entropy(model(x), y), optimizer) for _ in range(5) for x, y in loader]
    return losses, model.calls, weights(model)


def centred(distribute: Distribute) -> Any:
    return trained(distribute, Centred())


def centred_once(distribute: Distribute) -> Any:
    return trained(distribute, Centred(last=6))


def centred_in_one_line(distribute: Distribute) -> Any:
    return trained(distribute, Lined())


def divided_by_rows(distribute: Distribute) -> Any:
    return trained(distribute, Counted())


def divided_by_rows_where_a_call_runs_through(distribute: Distribute) -> Any:
    return trained(distribute, Counted(8))


def scaled(distribute: Distribute) -> Any:
    return trained(distribute, Scaled())


def scaled_on_one_rank(distribute: Distribute) -> Any:
    """A line that only one rank runs, and that changes nothing."""
    return trained(distribute, Scaled(99 if mw.rank() else 6))


def verdict_after(program: Any) -> tuple[Any, bool]:
    """What a program leaves, and whether its model runs apart in the end."""
    left = whole(program)
    verdict, *_ = session.engines[-1].whole.divided.verdicts.values()
    return left, verdict.dims is not None


def callbacks_at_each_step() -> list[int]:
    """How often Python calls back in each of 15 steps of a model that does something else from its 11th call on."""
    monitoring: Any = vars(sys)["monitoring"]
    tool = next(n for n in new_code.TOOLS if monitoring.get_tool(n) == "meshwise")
    counts = [0]

    def counting(callback: Any) -> Any:
        def called(*given: Any) -> Any:
            counts[-1] += 1
            return callback(*given)

        return called

    def counted(model: Any, optimizer: Any, loader: Any) -> Any:
        model, optimizer, loader = mw.distribute(model, optimizer, loader, view="whole")
        optimizer.register_step_post_hook(lambda *_: counts.append(0))
        return model, optimizer, loader

    kinds = (monitoring.events.PY_START, monitoring.events.INSTRUCTION)
    before = [monitoring.register_callback(tool, kind, None) for kind in kinds]
    try:
        for kind, callback in zip(kinds, before, strict=True):
            monitoring.register_callback(tool, kind, counting(callback))
        run(lambda distribute: trained(distribute, Scaled(11)), counted)
    finally:
        for kind, callback in zip(kinds, before, strict=True):
            monitoring.register_callback(tool, kind, callback)
    return counts


@pytest.mark.parametrize(
    "program",
    [
        centred,
        centred_once,
        centred_in_one_line,
        divided_by_rows,
        divided_by_rows_where_a_call_runs_through,
    ],
)
def test_code_that_mixes_rows_is_noticed_at_the_very_call(program: Any, pool: Any) -> None:
    want = run(program)
    for got, is_apart in pool(2).run(verdict_after, program):
        far, at = apart(got, want)
        assert far <= 1e-9, at
        assert not is_apart


@pytest.mark.parametrize("program", [scaled, scaled_on_one_rank])
def test_a_model_with_new_code_that_keeps_rows_apart_goes_on_apart(program: Any, pool: Any) -> None:
    results = pool(2).run(verdict_after, program)
    assert all(is_apart for _, is_apart in results)
    if program is scaled:
        for got, _ in results:
            far, at = apart(got, run(program))
            assert far <= 1e-9, at


def test_a_step_without_new_code_costs_nothing(pool: Any) -> None:
    for counts in pool(2).run(callbacks_at_each_step):
        assert counts[0] > 50
        assert counts[8:10] == [0, 0]
        assert counts[10] > 0
        assert counts[12:15] == [0, 0, 0]


def test_a_process_whose_tool_numbers_are_taken_runs_without(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(new_code, "TOOLS", ())
    before = [vars(sys)["monitoring"].get_tool(n) for n in range(6)]
    new_code._start.__wrapped__()(test_a_process_whose_tool_numbers_are_taken_runs_without.__code__, True)
    assert before == [vars(sys)["monitoring"].get_tool(n) for n in range(6)]
