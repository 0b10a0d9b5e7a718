"""Whether all plans of a large machine are ranked rightly by a closed form that few small traces have calibrated.

    python bench/ranking.py [--sample 60] [--seed 0] [--minutes 30]     rehearse the plans that were drawn, then compare
    python bench/ranking.py --most 32                                   drawn from those that are rehearsed in a minute
    python bench/ranking.py --all --minutes 600                         rehearse all of them, the drawn ones first
    python bench/ranking.py --all --only-rehearse --part 1/2            the second half of them, beside the first

Llama-3-70B, 1,024 rows of 4,096 tokens in bf16, on 512 H100: all plans of `rehearsal/candidates.py` whose stages hold
equally many blocks, in the order of `rehearsal/likely.py`. The five likely best of those that are drawn from are
rehearsed whole. Of `--sample` plans drawn by a seed the guessed seconds and bytes are compared with those of whole
rehearsals. Goals: all ranked within 60 seconds of a processor, the five rehearsed within 60 more, Spearman's rank
correlation at least 0.9.

Each rehearsal is a line of bench/results/ranking_rehearsed.jsonl as soon as it is made, and is not made again; it says
which constants it was priced with (lines without are of before 2026-11-28, 18:00). Lines 1 to 742 are of an engine that
kept what a stage had sent until the end of a step. The result: bench/results/ranking.json.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from keep import RESULTS, keep
from llamas import llama_70b

from meshwise.machine.words import machine_from_words
from meshwise.rehearsal.candidates import Space, candidates
from meshwise.rehearsal.constants import digest
from meshwise.rehearsal.estimate import Estimate
from meshwise.rehearsal.estimator import rehearser
from meshwise.rehearsal.few_stages import FEW_STAGES
from meshwise.rehearsal.from_few import Tracer, parts_traced
from meshwise.rehearsal.likely import Guess, Likely
from meshwise.rehearsal.small_traces import small_traces
from meshwise.spec.errors import MeshwiseError
from meshwise.spec.plan import Plan
from meshwise.spec.plan_settings import settings_text

MACHINE, BLOCKS = "64x8xH100@400Gb", 80
KEPT = RESULTS / "ranking_rehearsed.jsonl"
GIB, UNITS = 2**30, ("s", "GiB")
FIRST, LEAST = 5, 3


def plans_of_it() -> list[Plan]:
    """Those whose stages hold equally many blocks."""
    found = candidates(Space((512,), 8, llama_70b.batch_size, ("precision=bf16",)))
    return [plan for plan in found if BLOCKS % plan.pipeline == 0]


def spearman(one: Sequence[float], two: Sequence[float]) -> float:
    """The correlation of ranks; equal values share theirs."""

    def ranks(values: Sequence[float]) -> list[float]:
        ordered = sorted(values)
        return [ordered.index(v) + (ordered.count(v) - 1) / 2 for v in values]

    a, b = ranks(one), ranks(two)
    mean = (len(a) - 1) / 2
    top = sum((x - mean) * (y - mean) for x, y in zip(a, b, strict=True))
    return top / (sum((x - mean) ** 2 for x in a) * sum((y - mean) ** 2 for y in b)) ** 0.5


def told(plan: Plan, rehearse: Callable[[Plan], Estimate]) -> dict[str, Any]:
    """What a rehearsal says of a plan."""
    start, found = time.process_time(), {"plan": settings_text(plan), "constants": digest()}
    try:
        one = rehearse(plan)
    except MeshwiseError as error:
        return found | {"refused": str(error)}
    return found | {
        "seconds": one.seconds and one.seconds.value,
        "parts": {name: round(value, 4) for name, value in one.parts.items()},
        "memory": one.memory.total.value,
        "allocated": dict(one.memory.categories),
        "verdict": one.memory.verdict,
        "took": round(time.process_time() - start, 2),
    }


def known(path: Path = KEPT) -> dict[str, dict[str, Any]]:
    """What was rehearsed so far, by the plan's settings."""
    lines = path.read_text().splitlines() if path.exists() else []
    return {one["plan"]: one for one in map(json.loads, lines)}


def rehearse_more(plans: Sequence[Plan], rehearse: Callable[[Plan], Estimate], until: float) -> None:
    """Those that are not known yet, for as long as there is time."""
    for plan in plans:
        if time.monotonic() < until and settings_text(plan) not in known():
            with KEPT.open("a") as file:
                file.write(json.dumps(told(plan, rehearse)) + "\n")


def shared(plan: Plan) -> tuple[Any, ...]:
    """What plans have in common that share their traces, after how much is traced: they are rehearsed one by one."""
    rows = llama_70b.batch_size // plan.replicas // plan.accumulate
    parts = min(plan.pipeline, FEW_STAGES), plan.data > 1, plan.shard, plan.tensor, plan.sequence, str(plan.recompute)
    return parts_traced(plan), rows, *parts


def main() -> None:
    """Rank, rehearse the first, rehearse what was drawn, compare, keep."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--sample", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--most", type=int, help="drawn of plans of which so many microbatches on a stage are traced")
    parser.add_argument("--all", action="store_true")
    parser.add_argument("--only-rehearse", action="store_true")
    parser.add_argument("--part", default="0/1", help="of several processes that rehearse at once, this one's")
    options = parser.parse_args()
    until = time.monotonic() + 60 * options.minutes
    machine, program = machine_from_words(MACHINE), Tracer(llama_70b)
    rehearsed = rehearser(program, machine, interval=False, brief=True)
    began = time.process_time()  # what was imported took time before

    def rehearse(plan: Plan) -> Estimate:
        return rehearsed(plan).estimate

    plans, likely = plans_of_it(), Likely(program.model, machine, llama_70b.batch_size, small_traces(program, machine))
    guesses = {plan: likely(plan) for plan in plans}
    room = min(device.memory or 0 for device in machine.devices)
    ranked = sorted(plans, key=lambda plan: (guesses[plan].memory > room, guesses[plan].seconds))
    ranking = time.process_time() - began
    among = [plan for plan in plans if options.most is None or parts_traced(plan) <= options.most]
    drawn = random.Random(options.seed).sample(among, min(options.sample, len(among)))
    part, parts = map(int, options.part.split("/"))
    for each in (drawn, plans if options.all else []):
        own = sorted({shared(plan) for plan in each})[part::parts]
        rehearse_more(sorted((p for p in each if shared(p) in own), key=shared), rehearse, until)
    if options.only_rehearse:
        return
    tried = [plan for plan in ranked if plan in set(among)][:FIRST]
    rehearse_more(tried, rehearse, float("inf"))
    result, found = compared(guesses, [known().get(settings_text(plan), {}) for plan in drawn]), known()
    first = [found[name] for name in map(settings_text, tried)]
    told_first = [{name: one.get(name) for name in ("plan", "seconds", "verdict", "refused", "took")} for one in first]
    result = {
        "job": f"{llama_70b.name}, {llama_70b.batch_size} rows of 4,096 tokens, bf16, {MACHINE}",
        "plans": len(plans),
        "seconds of a processor to rank": round(ranking, 1),
        "and to rehearse the first five": round(sum(one["took"] or 0 for one in told_first), 1),
        "first five of those that are drawn from": told_first,
        "first five of all, guessed": {settings_text(plan): round(guesses[plan].seconds, 2) for plan in ranked[:FIRST]},
        **result,
    }
    for name, value in result.items():
        if name != "rows":
            print(f"{name:40} {value}", flush=True)
    keep("ranking", result)


def compared(guesses: Mapping[Plan, Guess], found: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Guesses beside what was rehearsed of the plans that were drawn, by the axes that they have."""
    named = {settings_text(plan): (plan, guess) for plan, guess in guesses.items()}
    rows = [
        {
            "plan": one["plan"],
            "guessed s": round(named[one["plan"]][1].seconds, 3),
            "rehearsed s": round(one["seconds"], 3),
            "guessed GiB": round(named[one["plan"]][1].memory / GIB, 1),
            "rehearsed GiB": round(one["memory"] / GIB, 1),
            "verdict": one["verdict"],
        }
        for one in found
        if one.get("seconds")
    ]

    def of(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        pairs = {what: ([r[f"guessed {what}"] for r in rows], [r[f"rehearsed {what}"] for r in rows]) for what in UNITS}
        off = statistics.median(abs(math.log(b / a)) for a, b in zip(*pairs["s"], strict=True))
        ranks = {f"spearman of {what}": round(spearman(*two), 3) for what, two in pairs.items()}
        return {"compared": len(rows), **ranks, "seconds off in the median": round(math.exp(off) - 1, 3)}

    groups: dict[str, list[Mapping[str, Any]]] = {}
    for row in rows:
        plan = named[row["plan"]][0]
        groups.setdefault(f"stages: {plan.pipeline > 1}, tensor: {plan.tensor > 1}", []).append(row)
    by_group = {name: of(own) for name, own in groups.items() if len(own) > LEAST}
    return {"drawn": len(found), **(of(rows) if len(rows) > LEAST else {}), "by group": by_group, "rows": rows}


if __name__ == "__main__":
    main()
