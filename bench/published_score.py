"""The scoreboard: errors by data set and by model family, intervals, and rankings of plans."""

from __future__ import annotations

import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

Row = Mapping[str, str]
Found = Mapping[str, Any]
Pair = tuple[Row, Found]

GOALS = {
    "llm-foundry": (0.12, 0.25),
    "torchtitan": (0.12, 0.25),
    "kempnerforge": (0.12, 0.25),
    "lambda": (0.20, None),
    "nvidia-dle": (0.20, None),
}
"""Of the step time: median and 90th percentile. Of memory 5 % where the row states its statistic."""
STATISTICS = {"allocated": "allocated", "reserved": "reserved"}
GROUP = ("model", "n_params", "n_gpus", "gpu", "global_batch", "seq_len", "precision")
"""Rows that are alike in these are plans of one job on one machine."""


def scored(pairs: Sequence[Pair]) -> dict[str, Any]:
    """Errors of rows of quality A and B. seconds: each row's estimate against its step time."""
    good = [(row, found) for row, found in pairs if row["quality"] in "AB"]
    times = [(float(row["step_time_s"]), found) for row, found in good if row["step_time_s"]]
    result: dict[str, Any] = {"rows": len(pairs), "A and B": len(good)}
    if times:
        signed = [found["seconds"] / measured - 1 for measured, found in times]
        errors = sorted(map(abs, signed))
        widths = [(found["high"] - found["low"]) / 2 / found["seconds"] for _, found in times]
        result["step time"] = {
            "rows": len(times),
            "median": round(statistics.median(errors), 4),
            "p90": round(quantile(errors, 0.9), 4),
            "bias": round(statistics.median(signed), 4),
            "in the interval": round(sum(f["low"] <= m <= f["high"] for m, f in times) / len(times), 3),
            "half-width over error": round(statistics.median(widths) / max(statistics.median(errors), 1e-9), 2),
        }
    for word, name in STATISTICS.items():
        sizes = [(float(row["peak_mem_GiB"]), found[name] / 2**30) for row, found in good if _states(row, word)]
        if sizes:
            signed = [ours / theirs - 1 for theirs, ours in sizes]
            errors = sorted(map(abs, signed))
            result[f"memory {name}"] = {
                "rows": len(sizes),
                "median": round(statistics.median(errors), 4),
                "p90": round(quantile(errors, 0.9), 4),
                "bias": round(statistics.median(signed), 4),
            }
    return result


def _states(row: Row, word: str) -> bool:
    """Whether the row has memory, of this statistic; where none is stated, allocated is what most programs print."""
    stated = row["mem_stat"]
    return bool(row["peak_mem_GiB"]) and (stated.startswith(word) or (word == "allocated" and "not stated" in stated))


def quantile(ordered: Sequence[float], share: float) -> float:
    """Between the two nearest."""
    place = share * (len(ordered) - 1)
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def ranked(pairs: Sequence[Pair], worst_over_best: float = 1.2) -> dict[str, Any] | None:
    """How well estimates order the plans of one job: over groups whose slowest plan takes 20 % longer than the best."""
    groups: dict[tuple[str, ...], list[tuple[float, float]]] = defaultdict(list)
    for row, found in pairs:
        if row["step_time_s"]:
            groups[tuple(row[name] for name in GROUP)].append((float(row["step_time_s"]), found["seconds"]))
    apart = [
        group
        for group in groups.values()
        if len(group) > 2 and max(m for m, _ in group) > worst_over_best * min(m for m, _ in group)
    ]
    if not apart:
        return None
    chosen = [min(group, key=lambda one: one[1])[0] / min(m for m, _ in group) for group in apart]
    taus = [kendall(group) for group in apart]
    return {
        "groups": len(apart),
        "plans": sum(map(len, apart)),
        "choice within 5 %": round(sum(ratio <= 1.05 for ratio in chosen) / len(chosen), 3),
        "choice over best, median": round(statistics.median(chosen), 3),
        "kendall tau, median": round(statistics.median(taus), 3),
        "kendall tau, mean": round(statistics.fmean(taus), 3),
    }


def kendall(pairs: Sequence[tuple[float, float]]) -> float:
    """Pairs in one order less those in the other, over all."""
    signs = [
        math.copysign(1, (a[0] - b[0]) * (a[1] - b[1])) if a[0] != b[0] and a[1] != b[1] else 0.0
        for place, a in enumerate(pairs)
        for b in pairs[:place]
    ]
    return sum(signs) / len(signs)


def scoreboard(rows: Sequence[Row], found_of: Callable[[Row], Found | None]) -> dict[str, Any]:
    """By data set and by family: what is reached; and why rows could not be built."""
    sets: dict[str, list[Pair]] = defaultdict(list)
    families: dict[str, list[Pair]] = defaultdict(list)
    reasons: dict[str, Counter[str]] = defaultdict(Counter)
    every: list[Pair] = []
    for row in rows:
        found = found_of(row)
        if found is None:
            reasons[row["dataset"]]["not estimated yet"] += 1
        elif "unusable" in found:
            reasons[row["dataset"]][found["unusable"][:160]] += 1
        else:
            every.append((row, found))
            sets[row["dataset"]].append((row, found))
            families[found["family"]].append((row, found))
    result: dict[str, Any] = {"all": scored(every) if every else {}, "sets": {}, "families": {}, "not built": {}}
    for name, pairs in sets.items():
        ranks = ranked(pairs)
        differs = sorted({text for _, found in pairs for text in found["differs"]})
        result["sets"][name] = scored(pairs) | {"goal": GOALS.get(name), "differs": differs}
        if ranks:
            result["sets"][name]["ranking"] = ranks
    result["families"] = {name: scored(pairs) for name, pairs in families.items()}
    result["not built"] = {name: dict(own.most_common()) for name, own in reasons.items()}
    return result


def table(result: Mapping[str, Any]) -> str:
    """The scoreboard for the terminal, and for docs, in Markdown."""
    titles = "rows of", "rows", "step time median", "90th percentile", "bias", "in the 80 % interval"
    head = f"| {' | '.join((*titles, 'half-width over error', 'memory median'))} |"
    lines = [head, "|---|---|---|---|---|---|---|---|"]
    lines += [_row(name, one) for name, one in _named(result)]
    return "\n".join(lines)


def _named(result: Mapping[str, Any]) -> Iterable[tuple[str, Mapping[str, Any]]]:
    yield from result["sets"].items()
    yield from ((f"family {name}", one) for name, one in result["families"].items())
    if result["all"]:
        yield "all together", result["all"]


def _row(name: str, one: Mapping[str, Any]) -> str:
    time = one.get("step time")
    cells = [f"{time['median']:.1%}", f"{time['p90']:.1%}", f"{time['bias']:+.1%}"] if time else ["", "", ""]
    cells += [f"{time['in the interval']:.0%}", f"{time['half-width over error']}"] if time else ["", ""]
    memory = [
        "{} {median:.1%} ({bias:+.1%}, {rows} rows)".format(word, **one[f"memory {word}"])
        for word in STATISTICS.values()
        if f"memory {word}" in one
    ]
    return f"| {name} | {one['A and B']} | {' | '.join(cells)} | {'; '.join(memory)} |"
