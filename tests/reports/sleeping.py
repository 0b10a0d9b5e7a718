"""A training loop in which every phase sleeps for a known time: what a timeline should show is known beforehand."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import meshwise as mw
from meshwise.records.folder import begin_session, end_session
from meshwise.reports.analyse import report_of
from meshwise.reports.read import read_timeline
from meshwise.reports.run_report import Report
from meshwise.reports.spans import Timeline
from meshwise.training.process.session import end_sessions
from meshwise.workers.environment import RUN_FOLDER

EVEN = {"data": 4.0, "forward": 6.0, "backward": 8.0, "optimizer": 3.0}
"""Milliseconds of each phase."""
Slept = dict[str, list[float]]
"""Seconds that a rank really slept in each phase, a step each."""


def sleeping_run(folder: str, steps: int, more: Mapping[int, Mapping[str, float]], size: int) -> Slept:
    """One rank: `steps` steps of EVEN, with `more[rank][phase]` ms on top, on a model of `size` parameters."""
    os.environ[RUN_FOLDER] = folder
    end_sessions()
    rank = mw.rank()
    slept: Slept = {phase: [] for phase in EVEN}

    def sleep(phase: str) -> None:
        began = time.perf_counter()
        time.sleep((EVEN[phase] + more.get(rank, {}).get(phase, 0.0)) / 1000)
        slept[phase].append(time.perf_counter() - began)

    model = _Net(size, sleep)
    optimizer: Any = _Sgd(model.parameters(), sleep)
    loader: Any = DataLoader(_Rows(steps, mw.world_size(), sleep), batch_size=mw.world_size())
    model, optimizer, loader = mw.distribute(model, optimizer, loader, view="rank")
    for x in loader:
        mw.backward(model(x).mean())
        optimizer.step()
        optimizer.zero_grad()
    end_sessions()
    del os.environ[RUN_FOLDER]
    return slept


class _Rows(Dataset[Tensor]):
    def __init__(self, steps: int, ranks: int, sleep: Any) -> None:
        self._length, self._sleep = steps * ranks, sleep

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> Tensor:
        self._sleep("data")
        return torch.ones(1)


class _Net(nn.Module):
    def __init__(self, size: int, sleep: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self._sleep = sleep

    def forward(self, x: Tensor) -> Tensor:
        self._sleep("forward")
        result: Tensor = _Sleeps.apply(self.weight.sum() * x, self._sleep)
        return result


class _Sleeps(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, sleep: Any) -> Tensor:
        ctx.sleep = sleep
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        ctx.sleep("backward")
        return gradient, None


class _Sgd(torch.optim.SGD):
    def __init__(self, parameters: Any, sleep: Any) -> None:
        super().__init__(parameters, lr=0.0)
        self._sleep = sleep

    def step(self, closure: Any = None) -> Any:
        self._sleep("optimizer")
        return super().step(closure)


def measured(
    run: Any,
    folder: Path,
    steps: int,
    more: Mapping[int, Mapping[str, float]],
    ranks: int,
    size: int = 1000,
    machines: int = 1,
) -> tuple[Timeline, Report, Sequence[Slept]]:
    """`run(function, *arguments)` calls it on every rank: the timeline, its report, what each rank slept."""
    folder.mkdir(parents=True, exist_ok=True)
    begin_session(folder, time.time(), job="sleeping", devices=["cpu"] * (ranks // machines), world=ranks)
    slept = run(sleeping_run, str(folder), steps, more, size)
    end_session(folder, "finished")
    timeline = read_timeline(folder)
    return timeline, report_of(timeline, str(folder)), slept
