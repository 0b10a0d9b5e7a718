"""Samples a second of predictions against a hand-written loop, in the same worker processes, run by run in turns.

    python bench/predict.py [--runs 15]

By hand: eval, no_grad, a slice of each batch, its outputs to the host; at the end JSON lines or a tensor is
saved (on two devices each rank takes its part of each batch, and rank 0 gets the others' rows by all_gather). Ours: the
loop of `mw.predict`, written in parts; opening, joining, syncing and moving the file count. Starting
workers and making the model is on neither side. Which side goes first alternates. CPU: of this rank's process, where
other programs take turns with it. The claim is made for batches of 5 ms or more; a small model is shown beside it.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from keep import keep, ratio_interval
from safetensors.torch import save_file
from torch import nn

import meshwise as mw
from meshwise.training.data.order import part
from meshwise.training.prediction.options import PredictOptions
from meshwise.training.prediction.predict import run_predict
from meshwise.workers.join import join


def small() -> tuple[nn.Module, torch.Tensor, int]:
    """Batches of less than a millisecond."""
    return nn.Sequential(nn.Linear(784, 128), nn.ReLU(), nn.Linear(128, 10)), torch.randn(12800, 784), 64


def cnn() -> tuple[nn.Module, torch.Tensor, int]:
    """Two convolutions."""
    layers = nn.Conv2d(3, 12, 3, padding=1), nn.ReLU(), nn.Conv2d(12, 12, 3, padding=1), nn.ReLU(), nn.MaxPool2d(4)
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(12 * 64, 10)), torch.randn(3200, 3, 32, 32), 64


def mlp() -> tuple[nn.Module, torch.Tensor, int]:
    """Six wide layers."""
    layers = [nn.Sequential(nn.Linear(1024, 1024), nn.ReLU()) for _ in range(6)]
    return nn.Sequential(*layers, nn.Linear(1024, 100)), torch.randn(6400, 1024), 64


CASES = {"cnn": cnn, "mlp": mlp, "small": small}


def job_of(case: str) -> mw.Job:
    """A case as a job."""
    torch.manual_seed(0)
    model, x, batch = CASES[case]()
    fit: dict[str, Any] = {"loss": lambda model, batch: model(batch[0]).mean(), "optimizer": torch.optim.SGD}
    return mw.Job(name=case, model=lambda: model, data=(x,), batch_size=batch, **fit)


@torch.no_grad()
def by_hand(job: mw.Job, out: Path) -> float:
    """The seconds of the loop that a user writes."""
    world, x = join().world, job.data()[0]
    model = job.model().eval()
    began, rows = time.perf_counter(), []
    for start in range(0, len(x), job.batch_size):
        first, last = part(start, min(start + job.batch_size, len(x)), world.size, world.rank)
        rows.append(model(x[first:last]).cpu())
    if world.size > 1:
        mine = torch.stack(rows)  # the sizes of the cases divide
        every = [torch.empty_like(mine) for _ in range(world.size)]
        dist.all_gather(every, mine)
        rows = list(torch.stack(every, 1).flatten(0, 2)[None])
    if world.rank == 0 and out.suffix == ".jsonl":
        out.write_text("".join(f"{json.dumps(row)}\n" for row in torch.cat(rows).tolist()))
    elif world.rank == 0:
        save_file({"output": torch.cat(rows)}, out)
    if world.size > 1:
        dist.barrier()
    return time.perf_counter() - began


def ours(job: mw.Job, out: Path) -> float:
    """The seconds of all of it but the model."""
    options = PredictOptions(job, out=out, overwrite=True, plan=mw.Plan(data=join().world.size))
    found = run_predict(job, options)
    assert found.computed == len(job.data()[0])
    return found.seconds


def measured(case: str, suffix: str, runs: int, folder: str) -> list[tuple[float, ...]]:
    """Seconds by hand and ours, and the CPU seconds of both, for each pair of runs."""
    torch.set_num_threads(1)
    job, pairs = job_of(case), []
    for number in range(runs + 1):
        sides = {"ours": ours, "hand": by_hand}
        order = sorted(sides, reverse=number % 2 == 1)
        took, cpu = dict[str, float](), dict[str, float]()
        for side in order:
            before = time.process_time()
            took[side] = sides[side](job, Path(folder, f"{side}{number}{suffix}"))
            cpu[side] = time.process_time() - before
        if number:  # the first warms up
            pairs.append((took["hand"], took["ours"], cpu["hand"], cpu["ours"]))
    return pairs


def main() -> None:
    """Measure, print, keep."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--runs", type=int, default=15)
    runs = parser.parse_args().runs
    result: dict[str, Any] = {"claim": "samples/s of by hand >= 0.97, batches of 5 ms or more", "runs": runs}
    for devices in (1, 2):
        for case in CASES:
            for suffix in (".jsonl", ".safetensors"):
                with tempfile.TemporaryDirectory() as folder:
                    pairs = mw.launch(measured, case, suffix, runs, folder, devices=f"{devices}xcpu")[0]
                hand, our, cpu_hand, cpu_our = (list(each) for each in zip(*pairs, strict=True))
                (ratio, low, high), (cpu, *_) = ratio_interval(hand, our), ratio_interval(cpu_hand, cpu_our)
                _, x, batch = CASES[case]()
                figures = {
                    "of_by_hand": round(ratio, 3),
                    "low": round(low, 3),
                    "high": round(high, 3),
                    "of_by_hand_in_cpu_seconds": round(cpu, 3),
                    "ms_a_batch_by_hand": round(statistics.median(hand) / (len(x) / batch) * 1e3, 2),
                    "samples_per_second": round(len(x) / statistics.median(our)),
                }
                result[f"{case}, {devices}xcpu, {suffix}"] = figures
                print(f"{case:6} {devices}xcpu {suffix:13} {figures}", flush=True)
    keep("predict", result)


if __name__ == "__main__":
    main()
