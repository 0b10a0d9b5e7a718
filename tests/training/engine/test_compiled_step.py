"""A program that compiles a function with a whole step in it, and a stream that is captured into a graph."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import meshwise as mw
from meshwise.reports import recorder as recording
from meshwise.reports.device_clock import DeviceClock
from meshwise.reports.recorder import Recorder
from meshwise.spec.world import World
from meshwise.training.guards import agreed
from meshwise.training.guards.agreed import SIGNS, Agreed
from meshwise.training.process.session import end_sessions

BREAKS = 3
"""Breaks of the graph in a step: mw.backward, the hook of the optimizer's step, torch's own zero_grad. Only lowered."""


def trained(compiled: bool) -> tuple[list[float], int]:
    """The weights after two epochs, and how often the graph broke."""
    from torch._dynamo.utils import counters

    counters.clear()
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    optimizer: Any = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    loader: Any = DataLoader(TensorDataset(torch.randn(24, 4), torch.randn(24, 1)), batch_size=8)
    model, optimizer, loader = mw.distribute(model, optimizer, loader, view="rank")

    def step(x: Tensor, y: Tensor) -> Tensor:
        loss = mw.backward(nn.functional.mse_loss(model(x), y))
        optimizer.step()
        optimizer.zero_grad()
        return loss

    run = torch.compile(step, backend="eager") if compiled else step
    for _ in range(2):
        for x, y in loader:
            run(x, y)
    end_sessions()
    weights = [number for p in model.parameters() for number in p.detach().reshape(-1).tolist()]
    return weights, sum(counters["graph_break"].values())


def both_ways() -> tuple[list[float], list[float], int]:
    plain, _ = trained(compiled=False)
    return plain, *trained(compiled=True)


@pytest.mark.seconds
def test_a_compiled_step_trains_as_it_is_written_and_breaks_its_graph_no_more_than_before(pool: Any) -> None:
    plain, compiled, breaks = pool(2).run(both_ways)[0]
    assert compiled == pytest.approx(plain, rel=1e-6)
    assert 1 <= breaks <= BREAKS


def test_marks_and_counters_stand_aside_while_a_stream_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[object] = []
    clock = DeviceClock(lambda: 7, lambda: made.append(object()))
    monkeypatch.setattr("meshwise.reports.device_clock.is_captured", lambda: True)
    monkeypatch.setattr(recording, "is_captured", lambda: True)
    assert clock.mark() == 7 and made == []
    recorder = Recorder()
    recorder.device = clock
    recorder.count("loss", torch.zeros(()))
    assert recorder.turn("forward") == 7 and recorder.drain() == ([], [])


def test_nothing_is_compared_while_a_stream_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agreed, "has_streams", lambda device: True)
    monkeypatch.setattr(agreed, "is_captured", lambda: True)
    looks = Agreed(World(0, 2, 0, 2, "cpu"), tuple)
    apart = torch.zeros(SIGNS + 1)  # would be read as ranks that differ, in a collective that nobody else enters
    looks.compare(apart)
    looks.finish()
