"""Everything of this project that needs a GPU, in one go.

    PYTHONPATH=src python bench/gpu.py

Correctness on CUDA (losses of the built-in jobs against a plain loop on the same GPU, float32 without TF32), time and
memory of the jobs, the cost of our step over a plain one, bf16 and fp16; plans of one device (precision, recompute,
offload, compile) checked against the plain loop, with the peaks that were allocated and reserved; copies against plain
CUDA events, and `meshwise bench` of all GPUs with its verdicts; arrays of one GPU as two places. Writes
bench/results/gpu.json.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from keep import keep
from rich.console import Console
from torch.utils.data import Subset

import meshwise as mw
from meshwise.api.bench import bench
from meshwise.api.check import check
from meshwise.api.run import start_job
from meshwise.jobs.registry import find_job
from meshwise.machine.file.write import machine_to_toml
from meshwise.machine.judge import sentence
from meshwise.spec.errors import MeshwiseError
from meshwise.spec.plan import Plan
from meshwise.timeline.analyse import report_of
from meshwise.timeline.read import read_timeline
from meshwise.timeline.spans import LANES
from meshwise.training.job import Job
from meshwise.training.loop import run_job
from meshwise.training.order import epoch_order
from meshwise.training.run_options import RunOptions

sys.path.insert(0, str(Path(__file__).parent))
from arrays import cases, seconds
from copies import on_gpus
from overhead import measure

STEPS = 50
PLANS = (
    Plan(),
    Plan(accumulate=2),
    Plan(recompute="full"),
    Plan(recompute="selective"),
    Plan(offload=("activations",)),
    Plan(offload=("activations",), recompute="full"),
    Plan(offload=("optimizer",)),
    Plan(precision="bf16"),
    Plan(precision="bf16", recompute="full", offload=("activations",)),
    Plan(precision="fp16"),
    Plan(precision="fp16", accumulate=2),
    Plan(compile=True),
)
"""Those of one device: what a GPU does otherwise than a CPU (pinned copies, side streams, half precision)."""


def plain_losses(job: Job) -> list[float]:
    """The first losses of a loop that a user would write on one GPU."""
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    torch.manual_seed(job.seed)
    model, losses = job.model().cuda(), []
    optimizer = job.optimizer(model.parameters())
    scheduler = job.scheduler(optimizer) if job.scheduler else None
    data = job.data()
    for indices in epoch_order(job.seed, 0, len(data)).split(job.batch_size)[:STEPS]:
        result = job.loss(model, tuple(t.cuda() for t in data.batch(indices)))
        loss = result[0] if isinstance(result, tuple) else result
        loss.backward()
        if job.clip_norm:
            torch.nn.utils.clip_grad_norm_(model.parameters(), job.clip_norm)
        optimizer.step()
        optimizer.zero_grad()
        if scheduler:
            scheduler.step()
        losses.append(float(loss))
    return losses


def largest_difference(name: str) -> float:
    """Between our losses and the plain loop's over the first steps, relative."""
    job = replace(find_job(name), epochs=1, test=None)
    with tempfile.TemporaryDirectory() as out:
        summary = mw.run(job, devices="1xcuda", out=out, log_every=10)
        lines = (Path(summary.folder) / "metrics.jsonl").read_text().splitlines()
    ours = [eval(line)["loss"] for line in lines[:STEPS]]
    return max(abs(a - b) / abs(b) for a, b in zip(ours, plain_losses(job), strict=False))


def run(job: str, precision: str) -> dict[str, Any]:
    """A whole run on all GPUs: final metrics, seconds, throughput, peak memory."""
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as out:
        summary, _ = start_job(RunOptions(job, devices="all", precision=precision, out=out), Console(quiet=True))
    return {
        "metrics": dict(summary.metrics),
        "seconds": time.perf_counter() - start,
        "samples_per_second": summary.samples_per_second,
        "peak_bytes": list(summary.memory),
        "phases": [dict(phases) for phases in summary.phases],
        "verdict": summary.verdict,
    }


def under_plan(name: str, plan: Plan) -> dict[str, Any]:
    """A plan on one GPU: proved against one device, and the peaks of a short run."""
    try:
        proof = check(name, plan=plan, devices="1xcuda", batch_size=8, steps=3)
        (peaks,) = mw.launch(peaks_of, name, plan, devices="1xcuda")
    except (MeshwiseError, mw.WorkerFailed) as error:  # one plan that cannot be must not end the others
        return {"refused or failed": str(error)[-2000:]}
    first = proof.comparison.first
    return {
        "equal": proof.equal,
        "first difference": None if first is None else [first.kind, first.name, first.relative, proof.module],
        "rounding": {r.kind: [r.one_device, r.plan] for r in proof.rounding},
        **peaks,
    }


def peaks_of(name: str, plan: Plan) -> dict[str, Any]:
    """In a worker: bytes allocated and reserved at most in the first ten steps, after the model was made."""
    job = find_job(name)
    job = replace(job, epochs=1, test=None, data=lambda: Subset(find_job(name).data(), range(10 * job.batch_size)))
    torch.cuda.reset_peak_memory_stats()
    start = time.perf_counter()
    run_job(job, RunOptions(plan=plan), None)
    return {
        "allocated bytes": torch.cuda.max_memory_allocated(),
        "reserved bytes": torch.cuda.max_memory_reserved(),
        "seconds of ten steps": round(time.perf_counter() - start, 3),
    }


def watched(job: str) -> dict[str, Any]:
    """The timeline of a run on all GPUs: its account, what is hidden, what watching took, whether times make sense."""
    with tempfile.TemporaryDirectory() as out:
        summary = mw.run(job, devices="all", epochs=1, out=out)
        timeline = read_timeline(Path(summary.folder))
    report, spans = report_of(timeline), timeline.spans
    steps = spans[spans["lane"] == LANES.index("main")]
    backwards = int((np.diff(steps["start"]) < 0).sum()) - len(report.ranks) + 1
    return {
        "verdict": report.verdict,
        "kinds": dict(report.kinds),
        "hidden communication s": [rank.hidden_seconds for rank in report.ranks],
        "log thread s": [rank.overhead_seconds for rank in report.ranks],
        "spans that end before they begin": int((spans["end"] < spans["start"]).sum()),
        "spans out of order": backwards,
        "clock error s": report.error_seconds,
        "missing": report.missing,
    }


def preflight() -> dict[str, Any]:
    """`meshwise bench` of all GPUs: verdicts, what was wrong, bf16 products at 8192 against the peak."""
    found = bench()
    products = [p for p in found.machine.devices[0].matmuls if (p.dtype, p.m, p.n) == ("bf16", 8192, 8192)]
    return {
        "exit code": found.exit_code,
        "seconds": round(found.seconds, 1),
        "stopped": found.stopped,
        "wrong": [result.wrong for result in found.wrong],
        "verdicts": [sentence(verdict) + f" ({verdict.level})" for verdict in found.verdicts],
        "bf16 8192 FLOP/s": [p.rate for p in products],
        "bf16 peak FLOP/s": found.machine.devices[0].peak.get("bf16"),
        "machine file": machine_to_toml(found.machine),
    }


def arrays() -> dict[str, Any]:
    """One GPU as two places: microseconds of small operations beyond bare torch calls, and that nothing waits: torch
    raises where the host does, until a value is read."""
    places = ["cuda:0", "cuda:0"]
    beyond = {
        name: statistics.median((seconds(ours) - seconds(bare)) * 1e6 for _ in range(50))
        for name, (ours, bare) in cases(places).items()
    }
    xp = mw.array_namespace(places)
    x, y = xp.ones(20_000_000, dtype=xp.float32), xp.full(20_000_000, 2.0, dtype=xp.float32)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        begin = time.perf_counter()
        for _ in range(100):
            x = xp.sqrt(x * y) + 1
        total = xp.sum(x[1:] - x[:-1])
        enqueued = time.perf_counter() - begin
    finally:
        torch.cuda.set_sync_debug_mode("default")
    value = float(total)
    return {"µs beyond": beyond, "enqueued": enqueued, "read": time.perf_counter() - begin, "value": value}


def main() -> None:
    """Measure, print, keep."""
    if not torch.cuda.is_available():
        sys.exit("bench/gpu.py needs a CUDA device; torch sees none here.")
    result: dict[str, Any] = {"gpus": torch.cuda.device_count()}
    for name in ("mnist-mlp", "mnist-cnn", "gpt"):
        result[f"{name}: largest relative difference to a plain loop in {STEPS} steps"] = largest_difference(name)
        for precision in ("fp32", "bf16", "fp16"):
            result[f"{name} {precision}"] = run(name, precision)
            print(name, precision, result[f"{name} {precision}"], flush=True)
    for name in ("gpt", "mnist-cnn"):
        result[f"plans of {name}"] = {repr(plan): under_plan(name, plan) for plan in PLANS}
        print(name, result[f"plans of {name}"], flush=True)
    result["timeline mnist-cnn"] = watched("mnist-cnn")
    result["copies"] = on_gpus(size=1 << 30)
    result["arrays"] = arrays()
    print("arrays", result["arrays"], flush=True)
    result["bench"] = preflight()
    (result["overhead mnist-cnn"],) = mw.launch(measure, "mnist-cnn", 1024, 200, devices="1xcuda")
    keep("gpu", result)


if __name__ == "__main__":
    main()
