"""What `meshwise plan` says of this machine, beside what it does: step time and bytes of pairs of job and plan.

    python bench/pairs.py [--minutes 20] [--only 2xcpu] [--score]       goes on where it stopped

On one worker of one core, on two, and on two and three hosts (network namespaces with shaped links, tests/hosts.py;
as root). A cluster is calibrated once, its links and collectives as `meshwise bench` measures them; operators are those
that a plan measures. All plans of a job are predicted and written down, then measured. Time: the median of the steps,
the slowest rank's; `processor`: of its main thread alone, without its waits. Memory: the peak of the events of torch's
allocator in the first two steps (bench/allocations.py).
Cores come to this bench before all else where that can be (bench/quiet.py); the load average stands beside each row.

Goals: step time 10 % median on two workers, 15 % elsewhere; allocated 5 % median, 10 % at worst; the plan that is
predicted fastest within 5 % of the measured best in 85 % of the jobs of a cluster; a third of those have plans that
differ by more than 20 %.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import os
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
import torch
from allocations import allocations, bind, folder_of, seconds_of
from keep import keep
from quiet import favoured
from small_jobs import job_of

from meshwise.hardware.allowance import allowed_cores
from meshwise.hardware.machines import find_machine
from meshwise.hardware.measure.processes import measure_ranks
from meshwise.hardware.measure.result import bench_of, merged, only_devices
from meshwise.planner.constants import digest
from meshwise.planner.measured import prices_here
from meshwise.planner.memory import memory_curve, with_inside
from meshwise.planner.prices import missing
from meshwise.planner.simulate import simulate
from meshwise.planner.trace import trace
from meshwise.spec.errors import MeshwiseError, PlanError
from meshwise.spec.machine import Machine
from meshwise.spec.plan import Plan
from meshwise.spec.plan_settings import plan_from_settings
from meshwise.workers.join import join
from tests.hosts import bits_of, hosts, run_on, why_not
from tests.pool import Pool

DONE = "pairs.jsonl"
CORES = 2
SIZES = tuple(1 << power for power in range(10, 25, 2))
CALIBRATING, ACROSS, MEASURING, OPERATORS, LONGEST = 20.0, 60.0, 2.0, 15.0, 0.2
"""Seconds: of a cluster's links and collectives, and of those between hosts, of a pair's steps, of a plan's operators
at most, and of the largest message with which a shaped link is measured."""
ONE = ("", "accumulate=2", "recompute=full", "precision=bf16")
TWO = ("data=2", "data=2 zero1=true", "data=2 accumulate=2", "shard=2", "pipeline=2 accumulate=4")
FEW, THREE = ("data=2", "shard=2", "pipeline=2 accumulate=4"), ("data=3", "shard=3")
BUILT_IN = {"mnist-mlp": 96, "mnist-cnn": 48, "mlp": 96, "gpt:tiny": 24}
FOREIGN = {"bert": 24, "gpt2": 12, "llama": 12, "vit": 24, "t5": 12, "opt": 12, "neox": 12, "qwen3": 12}
FOREIGN |= {"distilbert": 24, "electra": 24, "resnet": 48, "convnext": 24}
JOBS = BUILT_IN | FOREIGN
OVER_LINKS = ("mnist-mlp", "mlp", "bert", "vit")


@dataclass(frozen=True)
class Cluster:
    """Workers of this machine, or hosts of one worker each. rate: of the hosts' links, as tc writes it."""

    workers: int
    rate: str = ""

    def __str__(self) -> str:
        return f"{self.workers} hosts {self.rate}" if self.rate else f"{self.workers}xcpu"


Row = dict[str, Any]
Call = Callable[..., list[Any]]
"""Calls a function on every rank; gives what they return."""
CLUSTERS: dict[Cluster, tuple[Sequence[str], Sequence[str]]] = {
    Cluster(1): (tuple(JOBS), ONE),
    Cluster(2): (tuple(JOBS), TWO),
    **{Cluster(2, rate): (OVER_LINKS, FEW) for rate in ("100mbit", "200mbit", "1gbit")},
    **{Cluster(3, rate): (OVER_LINKS, THREE) for rate in ("200mbit", "1gbit")},
}


@contextlib.contextmanager
def started(cluster: Cluster) -> Iterator[Call]:
    """The ranks of a cluster."""
    if cluster.rate:
        with hosts(cluster.workers, cluster.rate) as made:
            importable = importlib.import_module(Path(__file__).stem)  # not __main__, which is another one there
            yield lambda function, *arguments: run_on(made, getattr(importable, function.__name__), *arguments)
        return
    pool = Pool(cluster.workers)
    try:
        yield lambda function, *arguments: pool.run(function, *arguments, timeout=300)
    finally:
        pool.close()


def measured_links(workers: int, names: list[str], sizes: tuple[int, ...], seconds: float) -> tuple[Machine, list[Any]]:
    """On each rank: the machine that it finds, and what is measured between the ranks."""
    join()
    if workers:
        bind(workers)
    return find_machine(), measure_ranks(names, sizes, seconds, ("links", "collectives"))


def calibrated(cluster: Cluster, call: Call) -> Machine:
    """The cluster as a machine with measured links."""
    own = 0 if cluster.rate else CORES
    names = [f"{'node' if cluster.rate else 'cpu:'}{number}" for number in range(cluster.workers)]
    most = bits_of(cluster.rate) / 8 * LONGEST if cluster.rate else SIZES[-1]
    sizes = tuple(size for size in SIZES if size <= most)
    answers = call(measured_links, own, names, sizes, ACROSS if cluster.rate else CALIBRATING)
    found = [machine for machine, _ in answers]
    bare = merged(found) if cluster.rate else only_devices(found[0], names)
    cores = min(cluster.workers, CORES)  # of one worker: a device is a core here
    bare = replace(bare, hosts=tuple(replace(host, cores=cores) for host in bare.hosts))
    return bench_of(bare, answers[0][1], (), measured="now", seconds=CALIBRATING).machine


def predicted(cluster: Cluster, machine: Machine, word: str, plan: Plan, folder: Path) -> dict[str, Any]:
    """Seconds with their interval, and bytes of each traced rank."""
    begin = time.monotonic()
    traces = trace(job_of(word, JOBS[word]), plan, "cpu")
    steps = [each.step for each in traces]
    prices = prices_here(machine, steps, OPERATORS, folder, cluster.workers)
    if unknown := missing(steps, prices):
        raise RuntimeError(unknown[0])
    step = simulate(steps, prices)
    inside = {each.step.rank: [with_inside(work, prices.inside) for work in (each.first, each.step)] for each in traces}
    return {
        "seconds": step.seconds,
        "low": step.low,
        "high": step.high,
        "bytes": {rank: max(memory_curve(work).peak.bytes for work in works) for rank, works in inside.items()},
        "took": time.monotonic() - begin,
    }


def real(workers: int, word: str, batch: int, settings: list[str]) -> list[tuple[list[tuple[float, float]], int]]:
    """On each rank: of each plan the seconds of its steps, and the peak of its bytes."""
    if workers:
        bind(workers)
    job, found = job_of(word, batch), []
    for words in settings:
        plan = plan_from_settings(words.split())
        seconds = seconds_of(job, plan, MEASURING)
        found.append((seconds, allocations(job, plan).peak))
    return found


def pairs_of(
    cluster: Cluster, machine: Machine, call: Call, word: str, settings: Sequence[str]
) -> list[dict[str, Any]]:
    """Predict all plans of a job, write them down, measure them."""
    folder, rows = Path(tempfile.gettempdir()) / "meshwise-pairs", []
    for words in settings:
        plan = plan_from_settings(words.split())
        try:
            said = predicted(cluster, machine, word, plan, folder)
        except PlanError as error:  # it runs on no machine
            print(f"{cluster} {word} {words}: {error}", flush=True)
            continue
        row = {"cluster": str(cluster), "job": word, "batch": JOBS[word], "plan": words, "constants": digest()}
        rows.append(row | {"predicted": said})
    with folder_of("pairs-predicted.jsonl").open("a") as file:
        file.writelines(json.dumps(row | {"at": time.time()}) + "\n" for row in rows)
    answers = call(real, 0 if cluster.rate else CORES, word, JOBS[word], [row["plan"] for row in rows])
    for number, row in enumerate(rows):
        steps = [[wall for wall, _ in answer[number][0]] for answer in answers]
        row["processor"] = max(statistics.median(own for _, own in answer[number][0]) for answer in answers)
        row["seconds"] = max(statistics.median(own) for own in steps)
        row["quartiles"] = [statistics.quantiles(steps[0], n=4)[at] for at in (0, 2)]
        row["steps"], row["load"] = len(steps[0]), os.getloadavg()[0]
        row["bytes"] = {rank: answer[number][1] for rank, answer in enumerate(answers)}
    return rows


def scored(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """By cluster and over all."""
    groups: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for row in rows:
        groups[row["cluster"]].append(row)
    return {name: _score(own) for name, own in [*groups.items(), ("all", rows)] if own}


def _score(rows: list[dict[str, Any]]) -> dict[str, Any]:
    off = [row["predicted"]["seconds"] / row["seconds"] - 1 for row in rows]
    sizes = [
        abs(bytes_ / row["bytes"][str(rank)] - 1) for row in rows for rank, bytes_ in row["predicted"]["bytes"].items()
    ]
    jobs: dict[tuple[str, str], list[dict[str, Any]]] = defaultdict(list)
    for row in rows:
        jobs[row["cluster"], row["job"]].append(row)
    several = [own for own in jobs.values() if len(own) > 1]
    near = [
        min(own, key=lambda row: row["predicted"]["seconds"])["seconds"] <= 1.05 * min(row["seconds"] for row in own)
        for own in several
    ]
    apart = [max(row["seconds"] for row in own) > 1.2 * min(row["seconds"] for row in own) for own in several]
    return {
        "pairs": len(rows),
        "time: median error": statistics.median(map(abs, off)),
        "time: bias": statistics.median(off),
        "time: worst": max(map(abs, off)),
        "in the interval": sum(row["predicted"]["low"] <= row["seconds"] <= row["predicted"]["high"] for row in rows),
        "memory: median error": statistics.median(sizes),
        "memory: worst": max(sizes),
        "jobs": len(several),
        "chosen within 5 % of the best": sum(near),
        "jobs whose plans differ by 20 %": sum(apart),
        "load": [min(row["load"] for row in rows), max(row["load"] for row in rows)],
    }


def main() -> None:
    """Predict, measure, print, keep."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--minutes", type=float, default=20.0)
    parser.add_argument("--only", default="")
    parser.add_argument("--score", action="store_true")
    asked = parser.parse_args()
    os.environ["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    os.environ.setdefault("KINETO_LOG_LEVEL", "5")
    path, end = folder_of(DONE), time.monotonic() + 60 * asked.minutes
    rows = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    done = {(row["cluster"], row["job"]) for row in rows}
    for cluster, (words, settings) in CLUSTERS.items():
        left = [word for word in words if (str(cluster), word) not in done]
        if asked.score or asked.only not in str(cluster) or not left or time.monotonic() > end:
            continue
        if cluster.rate and (reason := why_not()) is not None:
            print(f"{cluster}: not here: {reason}")
            continue
        with favoured(), started(cluster) as call:
            machine = calibrated(cluster, call)
            for word in left:
                if time.monotonic() > end:
                    break
                try:
                    found = pairs_of(cluster, machine, call, word, settings)
                except (MeshwiseError, RuntimeError, TimeoutError) as error:
                    print(f"{cluster} {word}: {error}", flush=True)
                    continue
                for row in found:
                    _show(row)
                    rows.append(json.loads(json.dumps(row)))
                with path.open("a") as file:
                    file.writelines(json.dumps(row) + "\n" for row in found)
    score = scored(rows)
    print(json.dumps(score, indent=2))
    about = {"cores": len(allowed_cores()), "threads": torch.get_num_threads(), "pairs": len(rows)}
    keep("pairs", about | {"score": score})


def _show(row: dict[str, Any]) -> None:
    said = row["predicted"]
    sizes = [row["bytes"][int(rank)] for rank in said["bytes"]]
    off = max((bytes_ / size - 1 for bytes_, size in zip(said["bytes"].values(), sizes, strict=True)), key=abs)
    print(
        f"{row['cluster']:15} {row['job']:10} {row['plan']:24} {said['seconds'] * 1e3:8.2f} ms predicted, "
        f"{row['seconds'] * 1e3:8.2f} measured ({said['seconds'] / row['seconds'] - 1:+.0%}), "
        f"{row['processor'] * 1e3:8.2f} of its thread, "
        f"bytes {off:+.2%}, load {row['load']:.1f}",
        flush=True,
    )


if __name__ == "__main__":
    main()
