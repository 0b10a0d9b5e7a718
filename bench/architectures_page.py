"""Write docs/internals/architectures.md from the lines of bench/breadth.py, each kind its own part.

    python bench/breadth.py --table
    python bench/breadth.py --packages --table

Counts go to bench/results.
"""

from __future__ import annotations

import json
import re
import sys
from collections import Counter
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
import foreign_table
from keep import keep, machine

PAGE = Path(__file__).parents[1] / "docs" / "internals" / "architectures.md"
AXES = {"data": "data=2", "shard": "shard=2", "tensor": "tensor=2", "pipeline": "pipeline=2", "context": "context=2"}
TASKS = {
    "causal": "Text, causal",
    "masked": "Text, masked",
    "seq2seq": "Text, sequence to sequence",
    "image": "Images",
    "video": "Video",
    "speech": "Speech, sequence to sequence",
    "ctc": "Speech, CTC",
    "audio": "Audio, classes",
    "timm": "timm",
    "torchvision": "torchvision",
}
WRONG = ("wrong", "crash", "timeout")
FOREIGN = "## Models of other packages"
Rows = Mapping[tuple[str, str], dict[str, Any]]


def results_of(rows: Rows) -> dict[str, Any]:
    """Of each architecture what each plan gave, and the sentences of what is refused."""
    found: dict[str, dict[str, Any]] = {}
    for (name, plan), row in rows.items():
        found.setdefault(name, {"task": row["task"]})[plan] = told(row)
    commits = Counter(row["commit"] for row in rows.values())
    versions = {name: metadata.version(name) for name in ("transformers", "timm", "torchvision")}
    return {"machine": machine(), "versions": versions, "commits": dict(commits.most_common()), "architectures": found}


def told(row: Mapping[str, Any]) -> dict[str, Any]:
    """What the page says of a pair."""
    return {key: row[key] for key in ("status", "largest", "share", "text") if row.get(key)}


def counts_of(results: Mapping[str, Any]) -> dict[str, Counter[str]]:
    """Plan -> how many architectures have each status; `wrong` is what crashed or did not end, too."""
    found: dict[str, Counter[str]] = {plan: Counter() for plan in AXES}
    for entry in results["architectures"].values():
        for plan in AXES:
            status = entry.get(plan, {}).get("status", "not run")
            found[plan]["wrong" if status in WRONG else status] += 1
    return found


def page(results: Mapping[str, Any]) -> str:
    """The page that the results make."""
    architectures, reasons = results["architectures"], list[str]()
    machine, of = results["machine"], results["versions"]
    lines = [
        "# Published architectures under each axis",
        "",
        "Written by `python bench/breadth.py --table`. Do not edit it by hand.",
        "",
        f"A tiny random model of each architecture of transformers {of['transformers']}, timm {of['timm']} and",
        f"torchvision {of['torchvision']} was trained for two steps on one device and on two CPU workers under",
        "each axis, in float64, and everything that `meshwise check` compares was compared: `equal` is within 1e-9. No",
        f"line of a model was changed. torch {machine['torch']}, {machine['date']}.",
        "",
        "Pipelines have 4 microbatches. A percentage is the share of the parameters that was divided, where it is",
        "below 80 % (shard) or half (tensor): such a model is right, and hardly smaller. Numbers are reasons, below.",
        "",
        *_totals(results),
    ]
    for task, title in TASKS.items():
        of_task = [name for name in sorted(architectures) if architectures[name]["task"] == task]
        chosen = {name: architectures[name] for name in of_task if _ran(architectures[name])}
        if chosen:
            rows = [[name, *(_cell(name, entry.get(plan), reasons) for plan in AXES)] for name, entry in chosen.items()]
            lines += ["", f"## {title}", "", *_table(["architecture", *AXES.values()], rows)]
    without = sorted(name for name, entry in architectures.items() if not _ran(entry))
    lines += ["", "## Reasons", "", *(f"{number}. {text}" for number, text in enumerate(reasons, 1))]
    if without:
        lines += ["", "## Not built", "", "The script finds no tiny configuration, or no input, for these: nothing is"]
        lines += ["said of them. " + ", ".join(without) + "."]
    return "\n".join(lines).rstrip() + "\n"


def _ran(entry: Mapping[str, Any]) -> bool:
    return any(entry.get(plan, {}).get("status", "not built") != "not built" for plan in AXES)


def _totals(results: Mapping[str, Any]) -> list[str]:
    kinds = {"equal": "equal", "equal, hardly divided": "equal, hardly divided", "refused": "refused", "wrong": "wrong"}
    kinds["equal but for a buffer, told"] = "equal but for a buffer that the model updates from its own samples, told"
    counts = counts_of(results)
    rows = [[title, *(str(counts[plan][status]) for plan in AXES)] for status, title in kinds.items()]
    return _table(["architectures", *AXES.values()], rows)


def _cell(name: str, result: Mapping[str, Any] | None, reasons: list[str]) -> str:
    status = "not run" if result is None else result["status"]
    if result is None or status in ("not built", "not run"):
        return ""
    if status == "equal":
        return "equal"
    if status.startswith("equal but"):
        return "equal but a buffer"
    if status == "equal, hardly divided":
        return f"equal, {result.get('share', 0.0):.0%}"
    text = reason(name, result)
    if text not in reasons:
        reasons.append(text)
    return f"{'refused' if status == 'refused' else '**wrong**'} ({reasons.index(text) + 1})"


def reason(name: str, result: Mapping[str, Any]) -> str:
    """The first sentence of what was said, without the names of one model."""
    text = re.split(r"\. (?=[A-Z])", str(result.get("text") or f"{result['status']}: nothing was said"))[0].rstrip(".")
    text = text.replace(name, "the model")
    text = re.sub(r"\b(?=[a-z])(?:\w+\.)+\w*\w+\b(?<![A-Z])", lambda found: _name(found[0]), text)
    return f"{text}."


def _name(dotted: str) -> str:
    """A dotted name of a module, as what it ends with; functions of torch stay as they are."""
    if dotted.startswith(("torch.", "nn.", "aten.")):
        return dotted
    return "….N" if dotted.split(".")[-1].isdigit() else f"….{dotted.split('.')[-1]}"


def _table(head: list[str], rows: list[list[str]]) -> list[str]:
    lines = [head, ["---"] * len(head), *rows]
    return ["| " + " | ".join(line) + " |" for line in lines]


def write(rows: Rows) -> None:
    """Write the counts, and the first part of the page."""
    results = results_of(rows)
    counts = {plan: dict(each) for plan, each in counts_of(results).items()}
    keep("breadth", {"versions": results["versions"], "commits": results["commits"], "counts": counts})
    PAGE.write_text(page(results) + "\n" + FOREIGN + PAGE.read_text().partition(FOREIGN)[2])


# ---- Models of other packages ---------------------------------------------------------------------------------------


def foreign_of(lines: Path) -> dict[str, Any]:
    """Of each model what each plan gave, at last, and how many gave what, at last and at first."""
    rows = [json.loads(line) for line in lines.read_text().splitlines()]
    first: dict[tuple[str, str], str] = {}
    for row in rows:
        if row["status"] != "not built":  # a mistake of the table here
            first.setdefault((row["name"], row["plan"]), row["status"])
    models = foreign_table.MODELS
    last = {
        (row["name"], row["plan"]): row
        for row in rows
        if row["name"] in models
        and row["plan"] in models[row["name"]].plans
        and row["call"] == models[row["name"]].call
    }
    counted = {key: row for key, row in last.items() if not models[key[0]].apart}
    found: dict[str, dict[str, Any]] = {}
    for (name, plan), row in last.items():
        facts = {"package": f"{models[name].package} {row['version']}", "apart": models[name].apart, "plans": {}}
        found.setdefault(name, facts)["plans"][plan] = told(row)
    return {
        "pairs": len(counted),
        "models": len({name for name, _ in counted}),
        "packages": len({models[name].package for name in found}),
        "counts": dict(Counter(row["status"] for row in counted.values()).most_common()),
        "counts at first": dict(Counter(first.get(key, row["status"]) for key, row in counted.items()).most_common()),
        "commits": dict(Counter(row["commit"] for row in last.values()).most_common()),
        "architectures": found,
    }


def part(results: Mapping[str, Any]) -> list[str]:
    """The lines of the page."""
    counts = ", ".join(f"{count} {status}" for status, count in results["counts"].items())
    models = results["architectures"]
    return [
        FOREIGN,
        "",
        "Written by `python bench/breadth.py --packages --table` from tests/programs/models/foreign_table.py, which",
        f"has the constructor calls. {results['models']} tiny random models of {results['packages']} packages in the",
        f"losses that train them, {results['pairs']} pairs of a model and a plan, compared as above: {counts}.",
        "",
        *_foreign_table({name: entry for name, entry in models.items() if not entry["apart"]}),
        "",
        "Not counted are programs of which no division of a batch computes what one device does, and which `check`",
        "tells; the same models without that are above.",
        "",
        *_foreign_table({name: entry for name, entry in models.items() if entry["apart"]}),
    ]


def _foreign_table(models: Mapping[str, Any]) -> list[str]:
    lines = ["| model | package | plans | |", "|---|---|---|---|"]
    for name, entry in models.items():
        fine = [plan for plan, found in entry["plans"].items() if found["status"] == "equal"]
        other = [
            f"{plan}: {found['status']}{_share(found)}{_why(name, found)}"
            for plan, found in entry["plans"].items()
            if found["status"] != "equal"
        ]
        other += [f"Why: {entry['apart']}."] if entry["apart"] else []
        lines.append(f"| {name} | {entry['package']} | {', '.join(fine) or '–'} | {'<br>'.join(other)} |")
    return lines


def _share(found: Mapping[str, Any]) -> str:
    return f", {found.get('share', 0.0):.0%}" if found["status"] == "equal, hardly divided" else ""


def _why(name: str, found: Mapping[str, Any]) -> str:
    return "" if found["status"].startswith("equal") else f" ({reason(name, found).replace('|', '/')})"


def write_foreign(lines: Path) -> None:
    """Write the counts, and the second part of the page."""
    results = foreign_of(lines)
    keep("foreign_models", {key: value for key, value in results.items() if key != "architectures"})
    PAGE.write_text(PAGE.read_text().partition(FOREIGN)[0] + "\n".join(part(results)) + "\n")
