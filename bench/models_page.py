"""Write docs/internals/models.md: which model works under which plan, for `python bench/equivalence.py --table`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

PAGE = Path(__file__).parents[1] / "docs" / "internals" / "models.md"


def page(results: dict[str, Any]) -> str:
    """The page that the results of bench/equivalence.py make."""
    models: dict[str, Any] = results["models"]
    measured = list(results["measured"].values())
    labels = list(dict.fromkeys(result["label"] for result in measured))
    cells = {(result["label"], result["model"]): result for result in measured}
    reasons = list(dict.fromkeys(reason for result in measured if (reason := _reason(result))))
    lines = [
        *_head(results),
        *_table(
            ["model", "parameters", "its classes are from", "lines changed in it"],
            [
                [name, f"{facts['parameters']:,}", facts["source"], str(facts["lines_changed"])]
                for name, facts in models.items()
            ],
        ),
    ]
    lines += ["", "## Which plan works", ""]
    lines += [
        f"A number is the largest relative difference after {results['steps']} steps, in float64: the plan works. "
        "`Plan(...)` is what the user writes; nothing else changes.",
        "",
    ]
    rows = [
        [_plan(label, measured), *(_cell(cells.get((label, name)), reasons) for name in models)] for label in labels
    ]
    lines += _table(["plan", *models], rows)
    lines += ["", *(f"{number}. {text}" for number, text in enumerate(reasons, 1))]
    return "\n".join(lines).rstrip() + "\n"


def _head(results: dict[str, Any]) -> list[str]:
    machine, alarms = results["machine"], results["false_alarms"]
    sentences = [
        f"Each of {results['cases'] - results['not_checked']} pairs of a model and a plan was run through "
        "`meshwise check`: the same model,",
        "data and seed on one device and under the plan, with the model's own dropout on. Gradients, parameters,",
        f"optimizer state, buffers and metrics were compared over {results['steps']} steps in float64.",
        f"{results['equal']} are equal within {results['claims']['largest'].removeprefix('<= ')}, {results['refused']}",
        f"are refused before a step; the largest difference is {results['largest']:.0e}.",
        f"With {len(results['clean_runs'])} more runs, each with another model, plan and seed,",
        f"there {'was' if alarms == 1 else 'were'} {alarms or 'no'} false alarm{'s' * (alarms != 1)}.",
        f"torch {machine['torch']}, transformers {results['transformers']}, CPU workers, {machine['date']}.",
    ]
    commits = ", ".join(f"{count} of {commit.rstrip('+')}" for commit, count in results["commits"].items())
    changed = sum(count for commit, count in results["commits"].items() if commit.endswith("+"))
    sentences += [
        f"By commit of the code and the suite: {commits}"
        + (f"; of these {changed} with files that were changed after it." if changed else "."),
        "(A result `before` a commit was made while that one was written, and committed with it.)",
        "In float64 gradients are reduced in float64 too, so `grad_dtype` is seen to change nothing else there; that",
        "gradients are sent in two bytes is counted in tests/checker. On CPU workers host and device are one",
        "memory, so of offload it is shown that the copies change no number.",
    ]
    about = [
        "The models are small, with the layers, dropout and tied weights of their kind. Llama, GPT-2, BERT and ViT are",
        "made from configurations of `transformers`, with random weights. The lines changed are counted: the file of a",
        "class from an installed package is byte for byte that of the package, and of other classes the lines that",
        "name meshwise count.",
    ]
    by = [
        "Written by `python bench/equivalence.py --table`. Do not edit it by hand.",
    ]
    return ["# Models under plans", "", *by, "", *sentences, "", *about, ""]


def _table(heads: list[str], rows: list[list[str]]) -> list[str]:
    return [_row(heads), _row(["---"] * len(heads)), *map(_row, rows)]


def _row(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _plan(label: str, measured: list[dict[str, Any]]) -> str:
    plans = {result["plan"] for result in measured if result["label"] == label}
    return f"{label}: `{plans.pop()}`" if len(plans) == 1 else f"{label}: `recompute=(its name,)`"


def _cell(result: dict[str, Any] | None, reasons: list[str]) -> str:
    if result is None:
        return "not run"
    if reason := _reason(result):
        return f"{reason.partition(':')[0].lower()} ({reasons.index(reason) + 1})"
    return f"{max(result['largest'].values()):.0e}" if result["equal"] else "**differs**"


def _reason(result: dict[str, Any]) -> str:
    """Why there is no number, with what it is called before a colon; empty where there is one."""
    if "refused" in result:
        return f"Refused: {result['refused']}"
    if "failed" in result:
        return f"**Failed**: {result['failed']}"
    return f"Not checked: {result['not_checked']}." if "not_checked" in result else ""


def write_page(results: dict[str, Any]) -> None:
    """Write it."""
    PAGE.write_text(page(results))
    print(f"written: docs/{PAGE.name}")
