"""Is "2 devices are slower than one" right? 20 pairs of job and plan, each measured both ways, in one run.

    python bench/speedup.py [--rounds 3] [--steps 14]

Two workers train under the plan, then one worker trains the same batches alone; the rounds go through all pairs again
and again, so that what else runs on the machine meets both sides alike. A device is a worker with one thread. The
report of the two knows the run on one device of the round before, as one that lies in the same folder of runs; without
it, it estimates one device. One device is measured after it for the truth.

Truth: `slower` or `faster` where the ratio of the steps (two / one) is on one side of 1 in every round, else `even`.
A pair is right when the report says it and two are slower, or is silent and two are not. `missed`: silent, and two are
slower. `wrong`: said, and two are not slower. `estimated` is the same without the earlier run.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from keep import keep

sys.path.insert(0, str(Path(__file__).parents[1]))
from meshwise.job.loop import run_job
from meshwise.job.options import RunOptions
from meshwise.jobs.registry import find_job
from meshwise.records import folder as names
from meshwise.spec.plan import Plan
from meshwise.timeline.analyse import report_of
from meshwise.timeline.read import read_timeline
from meshwise.timeline.run_report import Report
from tests.pool import Pool

REPLICAS, SHARD, ZERO1 = Plan(data=2), Plan(data=1, shard=2), Plan(data=2, zero1=True)
PAIRS: list[tuple[str, Plan, int]] = [
    *(("mnist-mlp", plan, size) for plan in (REPLICAS, SHARD, ZERO1) for size in (16, 512)),
    *(("mlp", plan, size) for plan in (REPLICAS, SHARD, ZERO1) for size in (16, 512)),
    *(("mnist-cnn", plan, size) for plan in (REPLICAS, SHARD) for size in (16, 512)),
    *(("gpt:tiny", plan, size) for plan in (REPLICAS, SHARD) for size in (4, 16)),
]
SHAPES = {"mnist-mlp": (1, 28, 28), "mnist-cnn": (1, 28, 28), "mlp": (1000,)}


def made_data(job: str, samples: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Samples of a job's shape, drawn."""
    draw = torch.Generator().manual_seed(0)
    if job in SHAPES:
        images = torch.randn(samples, *SHAPES[job], generator=draw)
        return images, torch.randint(10, (samples,), generator=draw)
    tokens = torch.randint(256, (samples, 129), generator=draw)
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def train(word: str, plan: Plan, batch_size: int, steps: int, folder: str) -> None:
    """In each worker: so many steps of the job under the plan, recorded."""
    job = find_job(word)
    data = made_data(word, steps * batch_size)
    job = replace(job, data=lambda: data, test=None, metrics=None, batch_size=batch_size, epochs=1)
    run_job(job, RunOptions(plan=plan, log_every=steps), Path(folder))


def measured(pool: Pool, word: str, plan: Plan, batch_size: int, steps: int, folder: Path) -> Report:
    """The report of one run, whose records are `folder`."""
    shutil.rmtree(folder, ignore_errors=True)
    facts = {"job": word, "source": "this", "request": {"job": word, "batch_size": batch_size}}
    names.begin_session(folder, time.time(), **facts, devices=["cpu"] * pool.size, world=pool.size)
    pool.run(train, word, plan, batch_size, steps, str(folder), timeout=600)
    names.end_session(folder, "finished")
    return report_of(read_timeline(folder), str(folder))


def says(report: Report) -> bool:
    """Whether it says that the devices are slower than one."""
    return any(finding.kind == "slower" for finding in report.findings)


def outcome(ratios: list[float], said: list[bool]) -> tuple[str, str]:
    """The truth of a pair, and how what was said stands to it."""
    truth = "slower" if min(ratios) > 1 else "faster" if max(ratios) < 1 else "even"
    says = sum(said) * 2 > len(said)
    if truth == "slower":
        return truth, "right" if says else "missed"
    return truth, "wrong" if says else "right"


def main() -> None:
    """Measure, print, keep."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=14)
    asked = parser.parse_args()
    found: list[dict[str, Any]] = [
        {"job": job, "plan": str(plan), "batch_size": size, "ratios": [], "said": [], "estimated": []}
        | {"two": [], "one": []}
        for job, plan, size in PAIRS
    ]
    loads = [os.getloadavg()[0]]
    two, one, runs = Pool(2), Pool(1), Path(tempfile.mkdtemp(prefix="speedup"))
    try:
        for round_number in range(asked.rounds + 1):
            for at, ((job, plan, size), pair) in enumerate(zip(PAIRS, found, strict=True)):
                ours = runs / str(at)
                if round_number:
                    of_two = measured(two, job, plan, size, asked.steps, ours / "two")
                    pair["said"].append(says(of_two))
                    pair["estimated"].append(says(report_of(read_timeline(ours / "two"))))
                of_one = measured(one, job, Plan(), size, asked.steps, ours / "one")
                if round_number:
                    pair["ratios"].append(of_two.step_seconds / of_one.step_seconds)
                    pair["two"].append(of_two.step_seconds)
                    pair["one"].append(of_one.step_seconds)
            loads.append(os.getloadavg()[0])
    finally:
        two.close()
        one.close()
        shutil.rmtree(runs)
    for pair in found:
        pair["truth"], pair["outcome"] = outcome(pair["ratios"], pair["said"])
        pair["outcome_estimated"] = outcome(pair["ratios"], pair["estimated"])[1]
        pair["ratio"] = statistics.median(pair["ratios"])
        print(
            f"{pair['job']:10} {pair['plan']:28} batch {pair['batch_size']:4}  two / one {pair['ratio']:5.2f} "
            f"({min(pair['ratios']):.2f} to {max(pair['ratios']):.2f}, {pair['truth']:6})  "
            f"said {sum(pair['said'])} of {len(pair['said'])}  {pair['outcome']:6}  "
            f"estimated {sum(pair['estimated'])}  {pair['outcome_estimated']}",
            flush=True,
        )
    counts = Counter(pair["outcome"] for pair in found)
    by_estimate = Counter(pair["outcome_estimated"] for pair in found)
    single = [(said, ratio > 1) for pair in found for said, ratio in zip(pair["said"], pair["ratios"], strict=True)]
    of_runs = {
        "said and slower": sum(said and slower for said, slower in single),
        "said and not slower": sum(said and not slower for said, slower in single),
        "silent and slower": sum(not said and slower for said, slower in single),
        "silent and not slower": sum(not said and not slower for said, slower in single),
    }
    print(f"{counts['right']} of {len(found)} right, {counts['missed']} missed, {counts['wrong']} wrong; {of_runs}")
    print(f"without the earlier run: {dict(by_estimate)}")
    keep(
        "speedup",
        {"rounds": asked.rounds, "steps": asked.steps, "load": loads, "pairs_by_outcome": dict(counts)}
        | {"pairs_by_estimate": dict(by_estimate)}
        | {"single_runs": of_runs, "pairs": found},
    )


if __name__ == "__main__":
    main()
