"""Whether all plans of a large machine are ranked rightly by guesses that a few rehearsals have calibrated.

    python bench/ranking.py [--sample 60] [--minutes 30] [--seed 0]

Llama-3-70B, 1,024 rows of 4,096 tokens in bf16, on 512 H100: the guesses of `rehearsal/likely.py` for every plan of
`rehearsal/candidates.py`, after rehearsals of at most six of them, one a kind; the five likely best are rehearsed. Of
`--sample` plans drawn by a seed the guessed seconds are compared with rehearsed ones. Goals: all ranked within 60 seconds
of a processor, the five rehearsed within 60 more, Spearman's rank correlation at least 0.9. What was rehearsed is kept,
and the script goes on where it stopped. Results: bench/results/ranking.json.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Sequence
from typing import Any

from keep import RESULTS, keep
from llamas import llama_70b

from meshwise.machine.words import machine_from_words
from meshwise.rehearsal.candidates import Space, candidates
from meshwise.rehearsal.estimator import rehearser
from meshwise.rehearsal.from_few import Tracer
from meshwise.rehearsal.likely import Likely
from meshwise.spec.errors import MeshwiseError
from meshwise.spec.plan import Plan
from meshwise.spec.plan_settings import plan_from_settings, settings_text

MACHINE = "64x8xH100@400Gb"
KINDS = (
    "shard=512 recompute=full",
    "shard=512",
    "data=8 shard=8 tensor=8 sequence=true recompute=full accumulate=2",
    "data=64 tensor=8 recompute=selective accumulate=4",
    "data=8 pipeline=8 tensor=8 accumulate=32",
    "shard=64 tensor=8 sequence=true recompute=full",
)
"""Of the plans that are rehearsed first: sharded with and without recompute, tensor with and without sequence, stages."""


def spearman(one: Sequence[float], two: Sequence[float]) -> float:
    """The correlation of ranks; equal values share theirs."""

    def ranks(values: Sequence[float]) -> list[float]:
        ordered = sorted(values)
        return [ordered.index(v) + (ordered.count(v) - 1) / 2 for v in values]

    a, b = ranks(one), ranks(two)
    mean = (len(a) - 1) / 2
    top = sum((x - mean) * (y - mean) for x, y in zip(a, b, strict=True))
    return top / (sum((x - mean) ** 2 for x in a) * sum((y - mean) ** 2 for y in b)) ** 0.5


def main() -> None:
    """Rehearse, rank, compare, keep."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--sample", type=int, default=60)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    until = time.monotonic() + 60 * options.minutes
    path = RESULTS / "ranking.json"
    kept: dict[str, Any] = json.loads(path.read_text())["rehearsed"] if path.exists() else {}
    machine, program = machine_from_words(MACHINE), Tracer(llama_70b)
    rehearse, began = rehearser(program, machine), time.process_time()
    plans = candidates(Space((512,), 8, llama_70b.batch_size, ("precision=bf16",)))
    likely, found = Likely(program.model, machine), {}
    for text in KINDS:
        plan = plan_from_settings((*text.split(), "precision=bf16"))
        found[plan] = rehearse(plan).estimate
        likely.learn(found[plan])
    guesses = {plan: likely(plan) for plan in plans}
    room = min(device.memory or 0 for device in machine.devices)
    ranked = sorted(plans, key=lambda plan: (guesses[plan].memory > room, guesses[plan].seconds))
    ranking = time.process_time() - began
    first = [(plan, rehearse(plan).estimate) for plan in ranked[:5]]
    rehearsing = time.process_time() - began - ranking
    drawn = random.Random(options.seed).sample(plans, min(options.sample, len(plans)))
    for plan in drawn:
        name = settings_text(plan)
        if name in kept or time.monotonic() > until:
            continue
        start = time.process_time()
        try:
            estimate = rehearse(plan).estimate
            seconds = None if estimate.seconds is None else estimate.seconds.value
            kept[name] = {"seconds": seconds, "memory": estimate.memory.total.value, "verdict": estimate.memory.verdict}
        except MeshwiseError as error:
            kept[name] = {"refused": str(error)}
        kept[name]["took"] = round(time.process_time() - start, 2)
        keep("ranking", {"rehearsed": kept})
    pairs = [(p, kept[settings_text(p)]) for p in drawn if kept.get(settings_text(p), {}).get("seconds")]
    rows = [
        {
            "plan": settings_text(plan),
            "guessed s": round(guesses[plan].seconds, 3),
            "rehearsed s": round(other["seconds"], 3),
            "guessed GiB": round(guesses[plan].memory / 2**30, 1),
            "rehearsed GiB": round(other["memory"] / 2**30, 1),
        }
        for plan, other in pairs
    ]
    result = {
        "job": f"{llama_70b.name}, {llama_70b.batch_size} rows of 4,096 tokens, bf16, {MACHINE}",
        "plans": len(plans),
        "seconds of a processor to rank": round(ranking, 1),
        "and to rehearse the first five": round(rehearsing, 1),
        "first five": [
            {"plan": settings_text(plan), "seconds": one.seconds and one.seconds.value, "memory": one.memory.verdict}
            for plan, one in first
        ],
        "compared": len(pairs),
        "spearman of seconds": spearman([r["guessed s"] for r in rows], [r["rehearsed s"] for r in rows]),
        "spearman of memory": spearman([r["guessed GiB"] for r in rows], [r["rehearsed GiB"] for r in rows]),
    }
    for name, value in result.items():
        print(f"{name:40} {value}", flush=True)
    keep("ranking", {**result, "rows": rows, "rehearsed": kept})


if __name__ == "__main__":
    main()
