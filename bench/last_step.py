"""What keeping the state after each step costs (`--redundancy`), in steps of about 5 ms and 50 ms.

    python bench/last_step.py [--pairs 300]

Steps of a model with Adam, in turns within one process: with nothing kept, with the state noted (what replicas pay for
a survivor to be able to write it), and with the state copied after each step into memory that outlives the process, all
of it and half of it (replicas share the copy). The median of the paired differences, with its 95 % interval, and the
bytes that are copied. One thread, whose time of the processor is counted: others may be at work on the machine.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import torch
from keep import keep
from torch import nn

from meshwise.recovery.last_state import Among, LastState
from meshwise.recovery.state import RunState

SIZES = {"5 ms": (256, 4, 64), "50 ms": (512, 8, 256)}
"""Width, layers and samples of a step."""


class Trained:
    """A model, and how its state is kept."""

    def __init__(self, width: int, layers: int, samples: int) -> None:
        torch.manual_seed(0)
        blocks = [part for _ in range(layers) for part in (nn.Linear(width, width), nn.BatchNorm1d(width), nn.ReLU())]
        model = nn.Sequential(*blocks)
        optimizer = torch.optim.Adam(model.parameters(), foreach=True)
        scaler = torch.amp.GradScaler("cpu", enabled=False)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10_000)
        self.state, self.x = RunState(model, optimizer, schedule, scaler, 0), torch.randn(samples, width)
        self.kept = {name: self._kept(among) for name, among in AMONG.items()}

    def _kept(self, among: Among) -> LastState:
        file = os.memfd_create("kept")
        return LastState(Path(f"/proc/{os.getpid()}/fd/{file}"), self.state, among, {"plan": ""})

    def step(self, after: Callable[[], None]) -> float:
        """Seconds of the processor for a step and what follows it."""
        began, state = time.thread_time(), self.state
        state.model(self.x).square().mean().backward()
        state.before_change()
        state.whole = False
        state.optimizer.step()
        state.optimizer.zero_grad()
        state.scheduler.step()  # type: ignore[union-attr]
        state.step, state.whole = state.step + 1, True
        after()
        return time.thread_time() - began


AMONG = {"noted": Among(2, 1, whole=True), "half copied": Among(2, 1, 0, 2), "copied": Among(1, 1)}


def measured(size: tuple[int, int, int], pairs: int) -> dict[str, Any]:
    """The cost of each way to keep."""
    trained = Trained(*size)

    def way(name: str) -> Callable[[], None]:
        last = trained.kept[name]

        def after() -> None:
            last.note()
            if name != "noted":
                last.write()

        return after

    ways = {"nothing": lambda: None, **{name: way(name) for name in AMONG}}
    for _ in range(20):
        for after in ways.values():
            trained.step(after)
    rows = numpy.array([[trained.step(after) for after in ways.values()] for _ in range(pairs)])
    step = float(numpy.median(rows[:, 0]))
    found: dict[str, Any] = {
        "step_ms": round(1e3 * step, 2),
        "state_bytes": trained.kept["copied"].size,
        "pairs": pairs,
    }
    draws = numpy.random.default_rng(0).integers(0, pairs, (1000, pairs))
    for number, name in enumerate(ways):
        if number:
            less = rows[:, number] - rows[:, 0]
            low, high = numpy.percentile(numpy.median(less[draws], axis=1), [2.5, 97.5])
            found[name] = {
                "bytes": 0 if name == "noted" else trained.kept[name].size,
                "share": float(numpy.median(less)) / step,
                "low": float(low) / step,
                "high": float(high) / step,
            }
    return found


def main() -> None:
    """Measure, and keep it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=300)
    pairs = parser.parse_args().pairs
    torch.set_num_threads(1)
    result = {name: measured(size, pairs) for name, size in SIZES.items()}
    for name, found in result.items():
        print(name, found)
    keep("last_step", result)


if __name__ == "__main__":
    main()
