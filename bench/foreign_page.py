"""bench/results/foreign_models.json and its part of docs/architectures.md, from the lines of bench/foreign_models.py.

python bench/foreign_models.py --table
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import breadth
import breadth_table
import foreign_table
from keep import keep


def results_of(lines: Path) -> dict[str, Any]:
    """The results that are kept: of each model what each plan gave, at last and, where it differs, at first."""
    first: dict[tuple[str, str], str] = {}
    for line in lines.read_text().splitlines():
        row = json.loads(line)
        if row["status"] != "not built":  # a mistake of the table here
            first.setdefault((row["name"], row["plan"]), row["status"])
    last = {
        key: row
        for key, row in breadth.read(lines).items()
        if key[0] in foreign_table.MODELS
        and key[1] in foreign_table.MODELS[key[0]].plans
        and row["call"] == foreign_table.MODELS[key[0]].call
    }
    counted = {key: row for key, row in last.items() if not foreign_table.MODELS[key[0]].apart}
    found: dict[str, dict[str, Any]] = {}
    for (name, plan), row in last.items():
        model = foreign_table.MODELS[name]
        facts = {"package": model.package, "version": row["version"], "call": model.call, "plans": {}}
        facts |= {"apart": model.apart} if model.apart else {}
        entry = found.setdefault(name, facts | {"loss": model.loss.__name__.strip("<>")})
        entry["plans"][plan] = {"status": row["status"]} | {
            key: row[key] for key in ("largest", "share", "text", "first", "module", "cause") if row.get(key)
        }
        if first.get((name, plan), row["status"]) != row["status"]:
            entry["plans"][plan]["at first"] = first[name, plan]
    return {
        "pairs": len(counted),
        "models": len({name for name, _ in counted}),
        "packages": len({entry["package"] for entry in found.values()}),
        "counts": dict(Counter(row["status"] for row in counted.values()).most_common()),
        "counts at first": dict(Counter(first.get(key, row["status"]) for key, row in counted.items()).most_common()),
        "commits": dict(Counter(row["commit"] for row in last.values()).most_common()),
        "architectures": found,
    }


def part(results: Mapping[str, Any]) -> list[str]:
    """The lines of the page."""
    counts = ", ".join(f"{count} {status}" for status, count in results["counts"].items())
    lines = [
        "## Models of other packages",
        "",
        "Written by `python bench/foreign_models.py --table` from bench/results/foreign_models.json, which has the",
        f"constructor calls. {results['models']} tiny random models of {results['packages']} packages in the losses",
        f"that train them, {results['pairs']} pairs of a model and a plan, compared as above: {counts}.",
        "",
        *_table({name: entry for name, entry in results["architectures"].items() if "apart" not in entry}),
        "",
        "Not counted are programs of which no division of a batch computes what one device does, and which `check`",
        "tells; the same models without that are above.",
        "",
        *_table({name: entry for name, entry in results["architectures"].items() if "apart" in entry}),
    ]
    return lines


def _table(models: Mapping[str, Any]) -> list[str]:
    lines = ["| model | package | plans | |", "|---|---|---|---|"]
    for name, entry in models.items():
        fine = [plan for plan, found in entry["plans"].items() if found["status"] == "equal"]
        other = [
            f"{plan}: {found['status']}{_share(found)}{_why(name, found)}"
            for plan, found in entry["plans"].items()
            if found["status"] != "equal"
        ]
        package = f"{entry['package']} {entry['version']}"
        other += [f"Why: {entry['apart']}."] if "apart" in entry else []
        lines.append(f"| {name} | {package} | {', '.join(fine) or '–'} | {'<br>'.join(other)} |")
    return lines


def _share(found: Mapping[str, Any]) -> str:
    return f", {found.get('share', 0.0):.0%}" if found["status"] == "equal, hardly divided" else ""


def _why(name: str, found: Mapping[str, Any]) -> str:
    return "" if found["status"].startswith("equal") else f" ({breadth_table.reason(name, found).replace('|', '/')})"


def write(lines: Path) -> None:
    """Write the results, and the page."""
    keep("foreign_models", results_of(lines))
    breadth_table.write_page()
