"""bench/results/breadth.json and docs/architectures.md from the lines that bench/breadth.py wrote.

python bench/breadth.py --table
"""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from keep import keep

PAGE = Path(__file__).parents[1] / "docs" / "architectures.md"
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
Rows = Mapping[tuple[str, str], dict[str, Any]]


def results_of(rows: Rows) -> dict[str, Any]:
    """The results that are kept: of each architecture what each plan gave, and the sentences of what is refused."""
    found: dict[str, dict[str, Any]] = {}
    for (name, plan), row in rows.items():
        entry = found.setdefault(name, {"task": row["task"], "type": row["type"]})
        entry[plan] = {"status": row["status"]} | {
            key: row[key] for key in ("largest", "share", "text", "first", "module", "cause") if row.get(key)
        }
    commits = Counter(row["commit"] for row in rows.values())
    packages = ("transformers", "timm", "torchvision")
    versions = {name: metadata.version(name) for name in packages}
    return {"versions": versions, "commits": dict(commits.most_common()), "architectures": found}


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
        "Written by `python bench/breadth.py --table` from bench/results/breadth.json. Do not edit it by hand.",
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
    """Write both files."""
    keep("breadth", results_of(rows))
    write_page()


def write_page() -> None:
    """Write the page, with the models of bench/foreign_models.py behind these."""
    import json

    from foreign_page import part
    from keep import RESULTS

    breadth, foreign = (json.loads((RESULTS / f"{name}.json").read_text()) for name in ("breadth", "foreign_models"))
    PAGE.write_text(page(breadth) + "\n" + "\n".join(part(foreign)) + "\n")
    print(f"written: {PAGE}")
