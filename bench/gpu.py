"""Everything of this project that needs a GPU, in parts of a few minutes, the one that is worth most first.

    PYTHONPATH=src python bench/gpu.py [PART ...]         the parts that bench/results/gpu.json lacks, or those named
    PYTHONPATH=src python bench/gpu.py --small [PART ...]  a trial on the fake CUDA (tests/cuda): nothing is kept

Each part is kept when it is done, and a part that fails does not end the others. docs/internals/evidence.md shows
`claims`.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from keep import RESULTS, keep
from torch.utils.data import Subset

import meshwise as mw
from meshwise.checker.check import check
from meshwise.hardware.bench import bench
from meshwise.hardware.machine_file import machine_to_toml
from meshwise.reports.analyse import report_of
from meshwise.reports.read import read_timeline
from meshwise.reports.spans import LANES
from meshwise.spec.errors import MeshwiseError
from meshwise.spec.plan import Plan
from meshwise.training.data.order import epoch_order
from meshwise.training.job.job import Job
from meshwise.training.job.loop import run_job
from meshwise.training.job.options import RunOptions
from meshwise.training.jobs.registry import find_job

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))
from arrays import seconds_of_one, small_cases  # noqa: E402
from overhead import measure  # noqa: E402

PROGRAMS = HERE.parent / "tests" / "programs" / "gpu"
STEPS = 50
SMALL = "--small" in sys.argv
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


def largest_difference(name: str) -> tuple[float, float]:
    """Between our losses and the plain loop's over the first steps, relative; and between two plain loops."""
    job = replace(find_job(name), epochs=1, test=None)
    with tempfile.TemporaryDirectory() as out:
        summary = mw.run(job, devices="1xcuda", out=out, log_every=10)
        lines = (Path(summary.folder) / "metrics.jsonl").read_text().splitlines()
    ours = [json.loads(line)["loss"] for line in lines[:STEPS]]
    plain, again = plain_losses(job), plain_losses(job)
    return tuple(max(abs(a - b) / abs(b) for a, b in zip(each, plain, strict=False)) for each in (ours, again))


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


def words(*command: str, may_fail: bool = False) -> str:
    """What `meshwise …` prints, in a folder of its own."""
    begin = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            [sys.executable, "-m", "meshwise", *command], cwd=folder, capture_output=True, text=True, timeout=450
        )
    print(f"{time.perf_counter() - begin:.1f} s: meshwise {' '.join(command)}", flush=True)
    if done.returncode and not may_fail:
        raise RuntimeError(
            f"meshwise {' '.join(command)}: exit {done.returncode}: {(done.stdout + done.stderr)[-2000:]}"
        )
    return done.stdout + done.stderr


# ---- The parts, each a dictionary of what was found; `claims` are those that hold, for docs/internals/evidence.md ---


def starts() -> dict[str, Any]:
    """Whether anything runs at all: workers, loader workers, a check, a killed rank, commands that look at devices."""
    many = f"{torch.cuda.device_count()}xcuda"
    found = {
        "run on one": words("run", "mnist-mlp", "--devices", "1xcuda", "--epochs", "1")[-300:],
        "run on all": words("run", "mnist-mlp", "--devices", many, "--epochs", "1")[-300:],
        "check": words("check", "mnist-mlp", "--devices", many, "--set", f"data={torch.cuda.device_count()}")[:300],
        "killed": words("run", "mnist-mlp", "--devices", many, "--epochs", "1", "--fault", "kill:rank=0,step=20")[
            -600:
        ],
        "devices": words("devices"),
        "examples/01": script("examples/01_mnist.py"),
    }
    return found | {
        "claims": {"workers start, train, are checked and replaced when killed": "run, check, kill, a script"}
    }


def script(path: str) -> str:
    """The last lines of a script of ours under `meshwise run`."""
    return words("run", "--devices", "1xcuda", str(HERE.parent / path))[-300:]


def losses() -> dict[str, Any]:
    """Losses of built-in jobs beside a plain loop's on the same GPU."""
    apart = {
        name: largest_difference(name) for name in (("mnist-mlp",) if SMALL else ("mnist-mlp", "mnist-cnn", "gpt"))
    }
    said = ", ".join(f"{name} {ours:.1e} ({itself:.1e})" for name, (ours, itself) in apart.items())
    claims = {"losses of our loop and a plain one (of two plain ones), the largest relative difference": said}
    return {"ours to a plain loop, that to itself": apart, "claims": claims}


def plans(name: str, first: int, last: int) -> dict[str, Any]:
    """Plans of one device, proved in float64."""
    found = {}
    for plan in PLANS[first : 1 if SMALL else last]:
        found[repr(plan)] = under_plan(name, plan)
        print(name, plan, found[repr(plan)], flush=True)
    equal = sum(each.get("equal", False) for each in found.values())
    which = f"{name}, plans {first + 1} to {last} of one device, compute what a plain loop computes"
    return {"plans": found, "claims": {which: f"{equal} of {len(found)} equal in float64"}}


def scripts(ways: tuple[str, ...]) -> dict[str, Any]:
    """A script with the two lines beside itself without them, in the ways that exist on a GPU alone."""
    found: dict[str, Any] = {}
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"  # products that are the same each time
    for way in ways:
        with tempfile.TemporaryDirectory() as folder:
            ours, plain = Path(folder) / "ours.json", Path(folder) / "plain.json"
            file = str(PROGRAMS / "gpu_script.py")
            bare = [sys.executable, file, way, str(plain), "plain"]
            told = words("run", "--devices", "1xcuda", file, way, str(ours), may_fail=True)
            done = subprocess.run(bare, capture_output=True, text=True, timeout=200)
            if not (ours.exists() and plain.exists()):
                found[way] = {"ours": None if ours.exists() else told[-1500:], "plain": done.stderr[-800:]}
                continue
            a, b = json.loads(ours.read_text()), json.loads(plain.read_text())
            found[way] = {"steps": len(a), "apart": max(abs(x - y) / abs(y) for x, y in zip(a, b, strict=True))}
            print(way, found[way], flush=True)
    apart = {way: each["apart"] for way, each in found.items() if "apart" in each}
    said = f"{len(apart)} of {len(found)} run, at most {max(apart.values(), default=0):.1e} apart"
    return {
        "ways": found,
        "claims": {f"losses of a script with the two lines are those without ({', '.join(ways)})": said},
    }


def tests() -> dict[str, Any]:
    """The tests that want an accelerator, without the fake."""
    where = [str(HERE.parent / "tests" / room) for room in ("transfer", "recovery")]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "gpu or cuda", "-rfs", *where]
    done = subprocess.run(command, capture_output=True, text=True, cwd=HERE.parent, timeout=300)
    return {"said": done.stdout[-6000:] + done.stderr[-500:]}


RACE = """
import torch, meshwise as mw
side = torch.cuda.Stream()
with mw.find_races() as found:
    x = torch.ones(1 << 22, device="cuda") * 2
    {wait}
    with torch.cuda.stream(side):
        y = x + 1
    torch.cuda.synchronize()
print(len(found))
"""


def races() -> dict[str, Any]:
    """The checker of races on real streams: one that is planted, the same with its wait, and our own under a run."""
    told = {}
    for wait in ("pass", "side.wait_stream(torch.cuda.current_stream())"):
        done = subprocess.run(
            [sys.executable, "-c", RACE.format(wait=wait)], capture_output=True, text=True, check=True
        )
        told[wait] = int(done.stdout.split()[-1])
    own = words("check", "mnist-mlp", "--perturb", "--devices", "1xcuda", "--set", "offload=optimizer", may_fail=True)
    claims = {"a missing wait is told, its twin is not": f"{told['pass']} and {told[wait]}"}
    return {"told": told, "check --perturb of an offloaded plan": own[-600:], "claims": claims}


def overhead() -> dict[str, Any]:
    """Our step over a plain one, by turns."""
    (found,) = mw.launch(measure, "mnist-cnn", 64 if SMALL else 1024, 10 if SMALL else 60, devices="1xcuda")
    return {"mnist-cnn": found, "claims": {"our step over a plain one, mnist-cnn": str(found)[:100]}}


def forecast(first: int, last: int) -> dict[str, Any]:
    """Step time and memory of configurations on which no constant was fitted, beside `meshwise plan`'s."""
    found = {}
    for name in list(CONFIGURATIONS)[first:last]:
        job, settings = CONFIGURATIONS[name]
        try:
            found[name] = forecast_of(f"{PROGRAMS / 'gpu_jobs.py'}:{job}", settings)
        except RuntimeError as error:
            found[name] = {"failed": str(error)}
        print(name, found[name], flush=True)
    steps = [abs(each["step off"]) for each in found.values() if each.get("step off") is not None]
    memory = [abs(each["memory off"]) for each in found.values() if each.get("memory off") is not None]
    said = f"{len(steps)} of {len(found)}: step {statistics.median(steps):.1%} off" if steps else "no step predicted"
    said += f", memory {statistics.median(memory):.1%} off (medians)" if memory else ""
    return {"configurations": found, "claims": {f"predictions {first + 1} to {last} beside what was measured": said}}


def forecast_of(job: str, settings: tuple[str, ...]) -> dict[str, Any]:
    """One of them: planned, run under that plan, and what the report says of both."""
    with tempfile.TemporaryDirectory() as folder:
        sets = [word for each in settings for word in ("--set", each)]
        plan, out = str(Path(folder) / "plan.toml"), str(Path(folder) / "runs")
        words("plan", job, *sets, "--devices", "1", "--save", plan)
        words("run", job, "--plan", plan, "--devices", "1xcuda", "--out", out, "--save-every", "1h")
        (run,) = Path(out).iterdir()
        told = json.loads(words("report", str(run), "--json"))["predicted"]
    most = max(told["memory"], key=lambda row: row["predicted"], default=None)
    off = most["predicted"] / most["measured"] - 1 if most and most["measured"] else None
    step = told["seconds"] / told["measured"] - 1 if told["seconds"] and told["measured"] else None
    return {"step off": step, "memory off": off, **told}


CONFIGURATIONS: dict[str, tuple[str, tuple[str, ...]]] = {
    f"{job} {' '.join(settings)}".strip(): (job, settings)
    for settings in (("precision=bf16",), (), ("precision=bf16", "recompute=full"), ("offload=optimizer",))
    for job in ("decoder", "wide", "long", "encoder", "convolutions")
}
"""Twenty: tests/programs/gpu/gpu_jobs.py under four plans."""


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
    """`meshwise bench` of all GPUs: what was wrong, bf16 products at 8192 against the peak."""
    found = bench(seconds=1.0, sizes="64K") if SMALL else bench(seconds=20.0)
    try:
        file = machine_to_toml(found.machine)
    except MeshwiseError as error:  # without tomli-w
        file = str(error)
    products = [p for p in found.machine.devices[0].matmuls if (p.dtype, p.m, p.n) == ("bf16", 8192, 8192)]
    return {
        "exit code": found.exit_code,
        "seconds": round(found.seconds, 1),
        "stopped": found.stopped,
        "wrong": [result.wrong for result in found.wrong],
        "bf16 8192 FLOP/s": [p.rate for p in products],
        "bf16 peak FLOP/s": found.machine.devices[0].peak.get("bf16"),
        "machine file": file,
    }


def arrays() -> dict[str, Any]:
    """One GPU as two places: microseconds of small operations beyond bare torch calls, and that nothing waits: torch
    raises where the host does, until a value is read."""
    places = ["cuda:0", "cuda:0"]
    beyond = {
        name: statistics.median((seconds_of_one(ours) - seconds_of_one(bare)) * 1e6 for _ in range(50))
        for name, (ours, bare) in small_cases(places).items()
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


def timeline() -> dict[str, Any]:
    """What the timeline of a run on all GPUs says of itself."""
    return {"mnist-mlp": watched("mnist-mlp")}


PARTS: dict[str, Callable[[], dict[str, Any]]] = {
    "starts": starts,
    "losses": losses,
    "scripts": lambda: scripts(("plain", "bf16", "fp16", "clip", "fused", "stream")),
    "graphs": lambda: scripts(("compile", "reduce-overhead")),
    "captured": lambda: scripts(("graph",)),
    "tests": tests,
    "plans 1": lambda: plans("mnist-cnn", 0, 6),
    "plans 2": lambda: plans("mnist-cnn", 6, 12),
    "plans 3": lambda: plans("gpt", 0, 6),
    "plans 4": lambda: plans("gpt", 6, 12),
    "races": races,
    "overhead": overhead,
    "forecast 1": lambda: forecast(0, 7),
    "forecast 2": lambda: forecast(7, 14),
    "forecast 3": lambda: forecast(14, 20),
    "bench": lambda: {"bench": preflight()},
    "arrays": lambda: {"arrays": arrays()},
    "timeline": timeline,
}
"""In the order of their worth: a session with a GPU may end at any moment."""


def main() -> None:
    """Run the parts that are asked for, and keep each when it is done."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(PARTS)}")
    parser.add_argument("--small", action="store_true", help="a trial on the fake CUDA: nothing is kept")
    options = parser.parse_args()
    if unknown := [part for part in options.parts if part not in PARTS]:
        parser.error(f"unknown: {', '.join(unknown)}. The parts are {', '.join(PARTS)}.")
    if not torch.cuda.is_available():
        sys.exit("bench/gpu.py needs a CUDA device; torch sees none here.")
    os.environ["MESHWISE_SMALL_GPU_JOBS"] = str(int(options.small))
    os.environ["PYTHONPATH"] = os.pathsep.join([str(HERE.parent / "src"), os.environ.get("PYTHONPATH", "")])
    path = RESULTS / "gpu.json"
    kept = json.loads(path.read_text()) if path.exists() and not options.small else {}
    for part in options.parts or [part for part in PARTS if part not in kept]:
        begin = time.perf_counter()
        try:
            found = PARTS[part]()
        except Exception:  # one part that fails must not end the others
            found = {"failed": traceback.format_exc()[-3000:]}
        found["seconds"] = round(time.perf_counter() - begin, 1)
        print(part, json.dumps(found, indent=1, default=str)[:4000], flush=True)
        if not options.small:
            add(path, part, found)


def add(path: Path, part: str, found: dict[str, Any]) -> None:
    """Keep a part beside the others, which other processes may be adding now."""
    with (RESULTS / "gpu.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        kept = json.loads(path.read_text()) if path.exists() else {}
        claims = kept.pop("claims", {}) | found.pop("claims", {})
        kept.pop("machine", None)
        keep("gpu", kept | {"gpus": torch.cuda.device_count(), "claims": claims, part: found})


if __name__ == "__main__":
    main()
