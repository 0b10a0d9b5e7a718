"""The scoreboard: errors by data set and by model family, intervals, and rankings of plans."""

from __future__ import annotations

import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

Row = Mapping[str, str]
Found = Mapping[str, Any]
Pair = tuple[Row, Found]

STATISTICS = {"allocated": "allocated", "reserved": "reserved"}
GROUP = ("model", "n_params", "n_gpus", "gpu", "global_batch", "seq_len", "precision")
"""Rows that are alike in these are plans of one job on one machine."""


def scored(pairs: Sequence[Pair], shares: Mapping[str, float]) -> dict[str, Any]:
    """Errors of these rows. shares: of the peak, by family, of the baseline."""
    times = [(float(row["step_time_s"]), found) for row, found in pairs]
    signed = [found["seconds"] / measured - 1 for measured, found in times]
    errors = sorted(map(abs, signed))
    flat = sorted(abs(found["ideal"] / shares[found["family"]] / measured - 1) for measured, found in times)
    result: dict[str, Any] = {"rows": len(pairs)}
    result["step time"] = {
        "median": round(statistics.median(errors), 4),
        "p90": round(quantile(errors, 0.9), 4),
        "bias": round(statistics.median(signed), 4),
        "in the interval": round(sum(f["low"] <= m <= f["high"] for m, f in times) / len(times), 3),
        "utilisation median": round(statistics.median(flat), 4),
        "utilisation p90": round(quantile(flat, 0.9), 4),
    }
    for word, name in STATISTICS.items():
        sizes = [
            (float(row["peak_mem_GiB"]), found[name] / 2**30)
            for row, found in pairs
            if name in found and _states(row, word)
        ]
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
    """What is reached, by data set, family, device and plan, beside one utilisation for each family; why rows could not
    be built."""
    reasons: dict[str, Counter[str]] = defaultdict(Counter)
    pairs: list[Pair] = []
    for row in rows:
        found = found_of(row)
        if found is None:
            reasons[row["dataset"]]["not traced yet"] += 1
        elif "unusable" in found:
            reasons[row["dataset"]][found["unusable"][:160]] += 1
        else:
            pairs.append((row, found))
    shares = utilisations(pairs)
    result: dict[str, Any] = {"rows": len(rows), "scored": len(pairs), "utilisations": shares}
    for name, key in BY.items():
        groups: dict[str, list[Pair]] = defaultdict(list)
        for pair in pairs:
            groups[key(pair[0])].append(pair)
        result[name] = {group: scored(own, shares) for group, own in sorted(groups.items())}
    result["summary"] = summary(result["data set"])
    for name, own in result["data set"].items():
        of_set = [pair for pair in pairs if set_of(pair[0]) == name]
        own["differs"] = sorted({text for _, found in of_set for text in found["differs"]})
        if ranks := ranked(of_set):
            own["ranking"] = ranks
    result["not scored"] = {name: dict(own.most_common()) for name, own in reasons.items()}
    return result


def group_of(name: str) -> str:
    """What a data set is counted with: its own medians count, rows are never pooled."""
    if name.startswith("vtrain"):
        return "vtrain"
    return "ResNet and BERT" if name.startswith(("lambda", "nvidia-dle")) else "language models"


def summary(sets: Mapping[str, Any]) -> dict[str, dict[str, float]]:
    """Medians over data sets, by group of them; the mean of the shares in the interval, since small sets have all or
    none of their rows in it."""
    groups: dict[str, list[Mapping[str, float]]] = defaultdict(list)
    for name, one in sets.items():
        groups[group_of(name)].append(one["step time"])
    return {
        group: {
            "sets": len(own),
            **{word: round(_middle(word)(one[word] for one in own), 4) for word in own[0]},
        }
        for group, own in groups.items()
    }


def _middle(word: str) -> Callable[[Iterable[float]], float]:
    return statistics.fmean if word == "in the interval" else statistics.median


def utilisations(pairs: Sequence[Pair]) -> dict[str, float]:
    """The one share of the peak for each family that is best on these very rows."""
    shares: dict[str, list[float]] = defaultdict(list)
    for row, found in pairs:
        shares[found["family"]].append(found["ideal"] / float(row["step_time_s"]))
    return {family: round(statistics.median(own), 4) for family, own in shares.items()}


def plan_of(row: Row) -> str:
    """Its axes, in a word."""
    shard = "FSDP" in row["fsdp_or_zero"] or "ZeRO-3" in row["fsdp_or_zero"]
    axes = (("pp", "pipeline"), ("tp", "tensor"), ("cp", "context"), ("dp", "shard" if shard else "data"))
    return " x ".join(word for axis, word in axes if (row[axis] or "1") != "1") or "one device"


BY: dict[str, Callable[[Row], str]] = {
    "data set": lambda row: set_of(row),
    "device": lambda row: row["gpu_family"] or row["gpu"],
    "plan": plan_of,
}
"""Rows are counted by each of these."""


def table(result: Mapping[str, Any]) -> str:
    """The scoreboard, in Markdown."""
    lines = [f"{result['scored']} of {result['rows']} rows of quality A and B are scored. Refused or missing:", ""]
    for name, reasons in result["not scored"].items():
        lines += [f"- {name}: {'; '.join(f'{count} {reason}' for reason, count in reasons.items())}"]
    lines += [
        "",
        "| median of each data set's | sets | median | 90th percentile | in the interval, mean | one utilisation |",
    ]
    lines += ["|---|---|---|---|---|---|"]
    lines += [
        f"| {name} | {one['sets']} | {one['median']:.1%} | {one['p90']:.1%} | {one['in the interval']:.0%} | "
        f"{one['utilisation median']:.1%}, {one['utilisation p90']:.1%} |"
        for name, one in result["summary"].items()
    ]
    for name in BY:
        titles = f"by {name}", "rows", "median error", "90th percentile", "bias", "in the 80 % interval"
        lines += ["", f"| {' | '.join((*titles, 'one utilisation: median, 90th', 'memory median'))} |"]
        lines += ["|---" * (len(titles) + 2) + "|"]
        lines += [_row(group, one) for group, one in result[name].items()]
    if "left out" in result:
        lines += ["", "| left out of a fit | rows | median error | 90th percentile | bias |", "|---|---|---|---|---|"]
        lines += [
            f"| {name} | {one['rows']:.0f} | {one['median']:.1%} | {one['p90']:.1%} | {one['bias']:+.1%} |"
            for name, one in result["left out"].items()
        ]
    return "\n".join(lines)


def _row(name: str, one: Mapping[str, Any]) -> str:
    time = one["step time"]
    cells = [f"{time['median']:.1%}", f"{time['p90']:.1%}", f"{time['bias']:+.1%}", f"{time['in the interval']:.0%}"]
    cells += [f"{time['utilisation median']:.1%}, {time['utilisation p90']:.1%}"]
    memory = [
        "{} {median:.1%} ({bias:+.1%}, {rows} rows)".format(word, **one[f"memory {word}"])
        for word in STATISTICS.values()
        if f"memory {word}" in one
    ]
    return f"| {name} | {one['rows']} | {' | '.join(cells)} | {'; '.join(memory)} |"


BEGIN, END = "<!-- bench/published.py writes what follows -->", "<!-- up to here -->"


def write(path: Path, result: Mapping[str, Any]) -> None:
    """Put the tables between the two marks of a document."""
    text = path.read_text()
    before, _, rest = text.partition(BEGIN)
    path.write_text(f"{before}{BEGIN}\n\n{table(result)}\n\n{END}{rest.partition(END)[2]}")


def set_of(row: Row) -> str:
    """What is scored as one: a data set, in those of several families a family of it."""
    several = row["dataset"] in ("lambda", "nvidia-dle")
    return f"{row['dataset']} {row['model'].split(' ')[0].partition('-')[0]}" if several else row["dataset"]
