"""Fits or not, at the edge: caps within 10 % of what a job really needs, drawn before anything is predicted.

    python bench/edge.py [--minutes 20] [--score]         goes on where it stopped
    python bench/edge.py --accelerate FOLDER              where the package lies, unless it is installed

Truth: what the allocator of torch really did in the first two steps of the job (bench/allocations.py), held against the
cap. `bytes`: the bytes that tensors have, as of a CPU worker. `segments`: the same sequence through the rules of the
caching allocator, as under `set_per_process_memory_fraction` of a GPU. Predicted: the verdict of `meshwise plan` for
the first, and the interval of reserved bytes for the second, both from the rehearsal.

Beside it, for plans of one device without recompute: the formula of `accelerate estimate-memory` for training with Adam
(four times the parameters), and the peak that torch's MemTracker counts on a step with real tensors.

Claims: nothing is called fitting that does not fit; of caps with 5 % or more to spare 90 % are called fitting, of those
with less a third.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import random
import sys
import time
from pathlib import Path
from typing import Any

import torch
from allocations import allocations, folder_of
from keep import keep
from small_jobs import job_of
from torch.distributed._tools.mem_tracker import MemTracker

from meshwise.hardware.allowance import allowed_cores
from meshwise.hardware.words import machine_from_words
from meshwise.planner.allocator import replay
from meshwise.planner.constants import FIGURES, digest
from meshwise.planner.estimate import FITS, TOO_CLOSE, TOO_LARGE
from meshwise.planner.estimator import rehearser
from meshwise.planner.measured import prices_here
from meshwise.planner.memory import with_inside
from meshwise.planner.trace import trace
from meshwise.spec.plan import Plan
from meshwise.torch_compat.tree import tensors_in
from meshwise.training.job.job import Job

SEED, AROUND, CAPS = 14, 0.1, 3
SPARE = 0.05
PLANS = (Plan(), Plan(accumulate=2), Plan(recompute="full"), Plan(precision="bf16"))
JOBS = {
    "mnist-mlp": 512,
    "mnist-cnn": 64,
    "mlp": 128,
    "gpt:tiny": 16,
    "gpt:small": 2,
    "bert": 16,
    "gpt2": 16,
    "llama": 16,
    "t5": 16,
    "vit": 32,
    "resnet": 64,
}
DONE = "edge.jsonl"


def drawn() -> list[dict[str, Any]]:
    """Every case with its caps, as shares of what it needs: from the seed alone."""
    draw = random.Random(SEED)
    cases = [
        {"job": word, "batch": batch, "plan": plan, "rule": rule}
        | {"shares": [1 + draw.uniform(-AROUND, AROUND) for _ in range(CAPS)]}
        for word, batch in JOBS.items()
        for plan in range(len(PLANS))
        for rule in ("bytes", "segments")
    ]
    draw.shuffle(cases)
    return cases


def judged(case: dict[str, Any]) -> dict[str, Any]:
    """The case with what it needs, and the verdict of each tool for each cap."""
    job, plan = job_of(case["job"], case["batch"]), PLANS[case["plan"]]
    real = allocations(job, plan)
    again = allocations(job, plan)  # the profiler has lost events now and then
    real = max(real, again, key=lambda one: one.peak)
    need = real.peak if case["rule"] == "bytes" else replay([real.work()]).reserved
    caps = [round(share * need) for share in case["shares"]]
    holds = [cap >= need if case["rule"] == "bytes" else not replay([real.work()], cap).failed for cap in caps]
    predicted, verdicts = _verdicts(job, plan, case["rule"], caps)
    found = case | {"plan": str(plan), "need": need, "caps": caps, "holds": holds}
    found |= {"predicted": predicted, "verdicts": verdicts, "load": os.getloadavg()[0], "constants": digest()}
    return found | (_others(job, case["rule"]) if plan == Plan() else {})


def _verdicts(job: Job, plan: Plan, rule: str, caps: list[int]) -> tuple[int, list[str]]:
    machine = machine_from_words("1xcpu")
    if rule == "bytes":
        memory = [rehearser(job, machine, cap)(plan).estimate.memory for cap in caps]
        return memory[0].allocated, [each.verdict for each in memory]
    traced = trace(job, plan, "cpu")[0]
    prices = prices_here(machine, [traced.step])
    reserved = replay([with_inside(work, prices.inside) for work in (traced.first, traced.step)]).reserved
    spread = FIGURES["reserved"].spread
    ranges = [FITS if reserved * spread <= cap else TOO_LARGE if reserved / spread > cap else TOO_CLOSE for cap in caps]
    return reserved, ranges


def _others(job: Job, rule: str) -> dict[str, int]:
    """What other tools say that a step needs."""
    model = job.model()
    found = {"tracker": _tracked(job, model)}
    try:
        estimate = importlib.import_module("accelerate.commands.estimate")
    except ImportError:
        return found
    size = sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))
    return found | {"accelerate": max(estimate.estimate_training_usage(size, "float32").values())}


def _tracked(job: Job, model: torch.nn.Module) -> int:
    """The peak that MemTracker sees in a second step."""
    optimizer = job.optimizer(model.parameters())
    data = job.data()
    batch = tuple(tensor[: job.batch_size] for tensor in data) if isinstance(data, tuple) else data
    if not isinstance(batch, tuple):
        batch = data.batch(torch.arange(job.batch_size))
    tracker: Any = MemTracker()
    tracker.track_external(model, optimizer, *tensors_in(batch))
    with tracker:
        for number in range(2):
            loss = job.loss(model, batch)
            (loss[0] if isinstance(loss, tuple) else loss).backward()
            optimizer.step()
            optimizer.zero_grad()
            if number == 0:
                tracker.reset_mod_stats()
    return int(tracker.get_tracker_snapshot("peak")[torch.device("cpu")]["Total"])


def scored(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Counts over all caps: of our verdicts, and of the others' figures where they have one."""
    ours = [pair for row in rows for pair in _pairs(row, [verdict == FITS for verdict in row["verdicts"]])]
    table = {"meshwise": _score(ours)}
    errors = sorted(abs(row["predicted"] / row["need"] - 1) for row in rows)
    for other in ("tracker", "accelerate"):
        own = [row for row in rows if other in row]
        pairs = [pair for row in own for pair in _pairs(row, [row[other] <= cap for cap in row["caps"]])]
        same = [pair for row in own for pair in _pairs(row, [verdict == FITS for verdict in row["verdicts"]])]
        table |= {other: _score(pairs), f"meshwise on the rows of {other}": _score(same)} if own else {}
    middle, worst = (errors[len(errors) // 2], errors[-1]) if errors else (0.0, 0.0)
    return {"cases": len(rows), "error median": middle, "error worst": worst, "verdicts": table}


def _pairs(row: dict[str, Any], says: list[bool]) -> list[tuple[bool, float, bool]]:
    """(it holds, share to spare, it is called fitting) of each cap."""
    spare = [cap / row["need"] - 1 for cap in row["caps"]]
    return list(zip(row["holds"], spare, says, strict=True))


def _score(pairs: list[tuple[bool, float, bool]]) -> dict[str, int]:
    fits = [(spare, says) for holds, spare, says in pairs if holds]
    wide, near = ([says for spare, says in fits if (spare >= SPARE) is wanted] for wanted in (True, False))
    return {
        "caps": len(pairs),
        "false fits": sum(says for holds, _, says in pairs if not holds),
        "that do not hold": sum(not holds for holds, _, _ in pairs),
        "with 5 % to spare": len(wide),
        "of those called fitting": sum(wide),
        "with less": len(near),
        "of these called fitting": sum(near),
    }


def main() -> None:
    """Judge, print, keep."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--minutes", type=float, default=20.0)
    parser.add_argument("--score", action="store_true")
    parser.add_argument("--accelerate", type=Path)
    asked = parser.parse_args()
    if asked.accelerate:
        sys.path.append(str(asked.accelerate))
    torch.set_num_threads(len(allowed_cores()))  # as a worker alone
    path, end = folder_of(DONE), time.monotonic() + 60 * asked.minutes
    rows = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    done = {(row["job"], row["plan"], row["rule"]) for row in rows}
    for case in drawn():
        if asked.score or time.monotonic() > end or (case["job"], str(PLANS[case["plan"]]), case["rule"]) in done:
            continue
        rows.append(row := judged(case))
        with path.open("a") as file:
            file.write(json.dumps(row) + "\n")
        print(
            f"{row['job']:10} {row['plan']:32} {row['rule']:8} needs {row['need'] / 1e6:8.2f} MB, "
            f"predicted {row['predicted'] / row['need'] - 1:+.2%}  {row['verdicts']}",
            flush=True,
        )
    score = scored(rows)
    print(json.dumps(score, indent=2))
    keep("edge", {"seed": SEED, "cases": len(rows), "score": score})


if __name__ == "__main__":
    main()
