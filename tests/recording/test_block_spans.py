"""Spans of blocks: forward and backward of each, within the phases, on any kind of module, and only where asked."""

from __future__ import annotations

from itertools import count

import pytest
import torch
from torch import Tensor, nn

import meshwise as mw
from meshwise.timeline.recorder import WIDTH, Recorder, make_current
from meshwise.workers.environment import BLOCKS


class Residual(nn.Module):
    """Takes and gives a dict, and adds its input: what a block of a real model may do."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, state: dict[str, Tensor]) -> dict[str, Tensor]:
        return {"x": state["x"] + self.linear(state["x"]).relu_()}


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.layers = nn.ModuleList(Residual() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        state = {"x": self.first(x)}
        for layer in self.layers:
            state = layer(state)
        return state["x"].sum()


def recorded(monkeypatch: pytest.MonkeyPatch, asked: str) -> list[tuple[str, str, int, int]]:
    monkeypatch.setenv(BLOCKS, asked)
    ticks = count()
    recorder = Recorder(clock=lambda: next(ticks))
    before = make_current(recorder)
    model = mw.distribute(Model())
    with recorder.span("forward"):
        loss = model(torch.ones(2, 4))
    with recorder.span("backward"):
        loss.backward()
    make_current(before)
    assert all(p.grad is not None for p in model.parameters())
    rows = recorder.drain()[0]
    return [
        (*recorder.names[rows[at]][::2], *rows[at + 1 : at + 3])  # type: ignore[misc]
        for at in range(0, len(rows), WIDTH)
    ]


def test_each_block_has_its_forward_and_its_backward_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    spans = {(kind, name): (start, end) for kind, name, start, end in recorded(monkeypatch, "1")}
    names = ["first", "layers.0", "layers.1"]
    assert {("forward", name) for name in names} | {("backward", name) for name in names} < spans.keys()
    forward = [spans["forward", name] for name in names]
    assert forward == sorted(forward) and all(a < b for a, b in forward)
    backward = [spans["backward", name][0] for name in reversed(names)]
    assert backward == sorted(backward)
    assert [spans["backward", name][1] for name in reversed(names)] == [*backward[1:], spans["backward", "first"][1]]
    for kind in ("forward", "backward"):
        start, end = spans[kind, ""]
        assert all(start < spans[kind, name][0] < spans[kind, name][1] < end for name in names)


def test_hooks_on_parameters_do_not_pile_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(BLOCKS, "1")
    before = make_current(Recorder())
    model = mw.distribute(Model())
    for _ in range(3):
        model(torch.ones(2, 4)).backward()
    make_current(before)
    hooks = [len(p._post_accumulate_grad_hooks or ()) for p in model.parameters()]
    assert max(hooks) == 1


@pytest.mark.parametrize("asked", ["", "0"])
def test_nobody_asked(monkeypatch: pytest.MonkeyPatch, asked: str) -> None:
    assert {name for _, name, _, _ in recorded(monkeypatch, asked)} == {""}
