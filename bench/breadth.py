"""Published architectures under each axis: whether two workers compute what one device computes, in float64.

    python bench/breadth.py [--lines FILE] [--only WORD ...] [--plan NAME ...] [--again STATUS ...] [--limit SECONDS]
    python bench/breadth.py --packages [...]
    python bench/breadth.py --table

Every architecture of tests/programs/models/tiny_models.py is trained for two steps, one of them ragged, on one device
and under data=2, shard=2, tensor=2, pipeline=2 with 4 microbatches, and context=2, and everything that `meshwise check`
compares is compared. Each result is a line of JSON, written as it is known: `equal`, `refused` (with the sentence),
`wrong` (the largest difference and where it began), `crash` or `timeout`. What has a line is not run again, unless its
status is named with `--again`. `--table` writes docs/internals/architectures.md from the lines.

`--packages`: the models of tests/programs/models/foreign_table.py, each the constructor call of a package that no other
bench names, with random weights, random samples in real shapes and the loss that the package's own training uses. The
packages lie in a folder of PYTHONPATH (`pip install --target FOLDER --no-deps ...`, as docs/internals/architectures.md
has them).

An equal model counts under shard if 80 % of its parameters were divided, under tensor if half of them were, and under
pipeline if both stages had a block and 4 microbatches were trained; else it is `equal, hardly divided`. A model that
keeps a statistic of its own in a buffer, which meshwise cannot join, is `equal but for a buffer, told`: a run says it.
"""

from __future__ import annotations

import argparse
import json
import logging
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Iterable, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "programs" / "models"))
sys.path.insert(0, str(Path(__file__).parent))
import foreign_table
import tiny_models
from torch.distributed.tensor import DTensor

from meshwise.checker.causes import CauseKind
from meshwise.checker.difference import LIMIT
from meshwise.checker.one_device import one_device
from meshwise.checker.programs import watch_job
from meshwise.checker.proof import prove
from meshwise.checker.trace import CheckSpec, Trace
from meshwise.parallel.shard_refusals import add_advice
from meshwise.spec.errors import PlanError
from meshwise.spec.plan import Plan
from meshwise.training.job.job import Job
from tests.pool import CaseFailed, Pool

ROOT = Path(__file__).parents[1]
MODELS = ROOT / "tests" / "programs" / "models"
STEPS, MICROBATCHES = 2, 4
PLANS = {
    "data": Plan(data=2),
    "shard": Plan(shard=2),
    "tensor": Plan(tensor=2),
    "pipeline": Plan(pipeline=2, accumulate=MICROBATCHES),
    "context": Plan(context=2),
}
OTHER_PLANS = PLANS | {
    "data × tensor": Plan(data=2, tensor=2),
    "shard × tensor": Plan(shard=2, tensor=2),
    "zero1": Plan(data=2, zero1=True),
}
LEAST = {"shard": 0.8, "tensor": 0.5, "data × tensor": 0.5, "shard × tensor": 0.8}
"""Share of the parameters that must be divided."""
REFUSALS = ("PlanError", "UsageError", "DataError")
Row = dict[str, Any]


def under_plan(folder: str, models: str, name: str, spec: CheckSpec, draws: Any) -> tuple[Trace | None, float, int]:
    """On a worker: what the plan does, the share of the parameters that is divided, calls of the loss. models: the
    module of `folder` whose `job_of(name)` is the job."""
    import importlib
    import logging as log
    import sys as system
    import warnings as warned

    if folder not in system.path:
        system.path.insert(0, folder)
    log.disable(log.WARNING)
    warned.filterwarnings("ignore")
    job, seen = importlib.import_module(models).job_of(name), {"share": 0.0, "calls": 0}

    def loss(model: Any, batch: Any) -> Any:
        seen["calls"] += 1
        return job.loss(model, batch)

    def optimizer(parameters: Iterable[Any]) -> Any:
        known = list(parameters)
        divided = [p for p in known if isinstance(p, DTensor) and any(q.is_shard() for q in p.placements)]
        seen["share"] = sum(p.numel() for p in divided) / max(sum(p.numel() for p in known), 1)
        return job.optimizer(known)

    try:
        found = watch_job(replace(job, loss=loss, optimizer=optimizer), spec, draws)
    except RuntimeError as error:  # of torch: a run adds its own sentence, if it knows one
        add_advice(error)
        if notes := getattr(error, "__notes__", ()):
            raise PlanError(notes[0]) from error
        raise
    return None if found is None else found.trace, seen["share"], int(seen["calls"])


@contextmanager
def time_limit(seconds: float) -> Any:
    """Raise TimeoutError in this process after so many seconds."""

    def ring(*unused: Any) -> None:
        raise TimeoutError(f"not done in {seconds:.0f} s")

    before = signal.signal(signal.SIGALRM, ring)
    signal.alarm(int(seconds))
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def hold(
    pool: Any,
    name: str,
    label: str,
    reference: dict[tuple[int, int], Trace],
    limit: float = 120,
    models: Any = tiny_models,
    plans: Mapping[str, Plan] = PLANS,
) -> Row:
    """One architecture under one plan. reference: (microbatches, samples of the ragged batch) -> what one device
    does; filled here. models: a module of MODELS with `job_of(name)`."""
    spec, row = CheckSpec(plans[label], STEPS), Row(status="crash")
    asked = spec.plan.accumulate, spec.ragged
    try:
        with time_limit(limit):
            if not reference and (why := cannot_be_built(models.job_of(name))):
                return Row(status="not built", text=why)
            if asked not in reference:
                reference[asked] = one_device(models.job_of(name), spec)
    except TimeoutError as late:
        return Row(status="timeout", text=f"one device: {late}")
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt):
            raise
        return Row(status="crash", text=f"one device: {type(error).__name__}: {_short(error)}", at=_where())
    one = reference[asked]
    try:
        answers = pool.run(under_plan, str(MODELS), models.__name__, name, spec, one.draws, timeout=limit)
    except CaseFailed as failed:
        status = "refused" if failed.kind in REFUSALS else "crash"
        more = {} if status == "refused" else {"at": failed.args[0][-600:]}
        return Row(
            status=status, text=_short(failed.text if status == "refused" else f"{failed.kind}: {failed.text}"), **more
        )
    except TimeoutError as late:
        return Row(status="timeout", text=str(late))
    many, row["share"], _ = answers[0]
    calls = [answer[2] for answer in answers]
    proof = prove(
        name, spec, f"{spec.plan.devices}xcpu", one, many, (), lambda spec: one_device(models.job_of(name), spec)
    )
    row["largest"] = max((k.largest.relative for k in proof.comparison.kinds if k.largest is not None), default=0.0)
    row["notes"] = list(proof.notes)
    if proof.equal:
        divided = row["share"] >= LEAST.get(label, 0.0) and (label != "pipeline" or min(calls) >= STEPS * MICROBATCHES)
        return row | {"status": "equal" if divided else "equal, hardly divided"}
    first, cause = proof.comparison.first, proof.cause
    others = [k.largest.relative for k in proof.comparison.kinds if k.largest is not None and k.kind != "buffers"]
    told = cause is not None and cause.kind is CauseKind.BUFFER and max(others, default=0.0) < LIMIT
    row |= {
        "status": "equal but for a buffer, told" if told else "wrong",
        "module": proof.module,
        "cause": "" if cause is None else cause.name,
    }
    if first is not None:
        row["first"] = [first.kind, first.step, first.name, first.relative]
    return row | {"text": "" if cause is None else _short(cause.evidence)}


def cannot_be_built(job: Job) -> str:
    """Why PyTorch alone does not train it as it is made here; empty where it does."""
    try:
        data = job.data()
        if job.collate is not None:
            few: Any = job.collate(data[:4])
        else:
            few = {k: v[:4] for k, v in data.items()} if isinstance(data, dict) else tuple(v[:4] for v in data)
        found = job.loss(job.model().train(), few)
        (found[0] if isinstance(found, tuple) else found).backward()
    except Exception as error:  # whatever a model of others raises
        return f"{type(error).__name__}: {_short(error, 200)}"
    return ""


def _where() -> str:
    return traceback.format_exc()[-600:]


def _short(text: object, most: int = 500) -> str:
    return " ".join(str(text).split())[:most]


def read(lines: Path) -> dict[tuple[str, str], Row]:
    """(architecture, plan) -> its last result."""
    rows = [json.loads(line) for line in lines.read_text().splitlines()] if lines.exists() else []
    return {(row["name"], row["plan"]): row for row in rows}


def play(
    asked: argparse.Namespace,
    entries: Mapping[str, tuple[Row, Iterable[str]]],
    models: Any = tiny_models,
    plans: Mapping[str, Plan] = PLANS,
) -> bool:
    """Run what has no line yet; gives whether all has one. entries: name -> what its lines say of it, its plans."""
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    asked.lines.parent.mkdir(parents=True, exist_ok=True)
    pools, until = dict[int, Pool](), time.monotonic() + asked.seconds
    for name, (facts, labels) in entries.items():
        if asked.only and not any(word.lower() in name.lower() for word in asked.only):
            continue
        known, reference = read(asked.lines), dict[tuple[int, int], Trace]()
        for label in (label for label in labels if label in asked.plan):
            before = known.get((name, label))
            known_call = before is not None and before.get("call") == facts.get("call")
            if before is not None and known_call and before["status"] not in asked.again:
                continue
            if time.monotonic() > until:
                break
            devices = plans[label].devices
            pool = pools.get(devices) or pools.setdefault(devices, Pool(devices))
            began = time.perf_counter()
            row = Row(name=name) | facts | Row(plan=label)
            row |= hold(pool, name, label, reference, asked.limit, models, plans)
            row |= {"seconds": round(time.perf_counter() - began, 1), "commit": commit()}
            with asked.lines.open("a") as file:
                file.write(json.dumps(row) + "\n")
            print(name, label, row["status"], row["seconds"], row.get("text", "")[:200], flush=True)
    for pool in pools.values():
        pool.close()
    return time.monotonic() <= until


def main() -> None:
    """Run what has no line yet."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--packages", action="store_true", help="models of other packages, under more plans")
    parser.add_argument("--lines", type=Path, help="where results lie")
    parser.add_argument("--only", nargs="*", default=[])
    parser.add_argument("--plan", nargs="*", default=list(OTHER_PLANS), choices=list(OTHER_PLANS))
    parser.add_argument("--again", nargs="*", default=[])
    parser.add_argument("--limit", type=float, default=120)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="no pair begins after so many")
    parser.add_argument("--table", action="store_true")
    asked = parser.parse_args()
    asked.lines = asked.lines or ROOT / "runs" / ("foreign_models.jsonl" if asked.packages else "breadth.jsonl")
    if asked.table:
        import architectures_page

        architectures_page.write_foreign(asked.lines) if asked.packages else architectures_page.write(read(asked.lines))
        return
    if not asked.packages:
        found = tiny_models.architectures()
        play(asked, {name: (Row(task=task, type=kind), PLANS) for name, (task, kind, _) in found.items()})
        return
    entries = {
        name: (Row(package=model.package, version=foreign_table.version_of(model), call=model.call), model.plans)
        for name, model in foreign_table.MODELS.items()
    }
    sys.exit(0 if play(asked, entries, foreign_table, OTHER_PLANS) else 75)


def commit() -> str:
    """The commit of the code, with a `+` where it was changed after it."""
    import subprocess

    def git(*words: str) -> str:
        return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()

    return git("log", "-1", "--format=%h", "--", "src") + "+" * bool(git("status", "--short", "--", "src"))


if __name__ == "__main__":
    main()
