"""One job under one plan, in workers that are kept: what fake GPUs make of it, and what as many CPU workers do."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors.torch import load_file
from torch import Tensor

from meshwise.spec.plan import Plan
from meshwise.training.job.loop import run_job
from meshwise.training.job.options import RunOptions
from tests.checker.jobs_to_check import built_in
from tests.cuda.jobs import JOBS
from tests.pool import Pool


@dataclass(frozen=True)
class Trained:
    """What a run has left. notes: what it said of the plan."""

    losses: list[float]
    metrics: dict[str, float]
    notes: tuple[str, ...]
    weights: dict[str, Tensor]


def run(name: str, plan: Plan, folder: str, more: dict[str, Any]) -> Any:
    """On every rank."""
    job = JOBS[name]() if name in JOBS else built_in(name)
    result = run_job(job, RunOptions(plan=plan, log_every=1, **more), Path(folder))
    return result["losses"], result["metrics"], result["notes"]


def trained(pool: Pool, name: str, plan: Plan, **more: Any) -> Trained:
    """An epoch of the job, in these workers."""
    with tempfile.TemporaryDirectory() as folder:
        every = pool.run(run, name, plan, folder, more)
        assert all(rank[:2] == every[0][:2] for rank in every), every
        return Trained(*every[0], load_file(Path(folder) / "weights.safetensors"))


_known: dict[Any, Trained] = {}


def known(pool: Pool, name: str, plan: Plan, **more: Any) -> Trained:
    """`trained`, once for all who ask."""
    key = name, plan, tuple(more.items())
    if key not in _known:
        _known[key] = trained(pool, name, plan, **more)
    return _known[key]


def apart(a: Trained, b: Trained) -> float:
    """The largest difference: of a loss and of a metric by its size, of a tensor by that of its largest value."""
    assert len(a.losses) == len(b.losses) > 0 and a.metrics.keys() == b.metrics.keys()
    assert {name: t.shape for name, t in a.weights.items()} == {name: t.shape for name, t in b.weights.items()}
    numbers = [*zip(a.losses, b.losses, strict=True), *((a.metrics[name], b.metrics[name]) for name in a.metrics)]
    found = [abs(x - y) / abs(x) for x, y in numbers]
    for name, tensor in a.weights.items():
        found.append(float((tensor.double() - b.weights[name].double()).abs().max() / tensor.abs().max().clamp(1e-30)))
    assert all(each == each for each in found)  # no NaN
    return max(found)
