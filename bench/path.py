"""What a training step calls of meshwise, and what a run calls until its first step.

    python bench/path.py

Of a steady step, from the end of one `optimizer.step` to the end of the next: the files and functions that the main
thread of rank 0 enters, the lines with code of these functions, its calls of functions of ours, and its calls of
Python's library that ours make. Of a start: the files entered from `cli.main` to the end of the first step, in
launcher and workers, in any thread. Resumed generators count; imports do not, nor do bundled programs (`jobs/`). Of 20
steps the one with the fewest calls is taken: the others do what is done now and then (each second, at step 32), more
often where steps are slow.

Programs: the job `mnist-mlp`, a script by rank, and one that sees whole batches (examples/01_mnist.py), on one worker
and on two. Claim: at most 70 calls, 17 files, 55 functions and 510 lines of the first two on two workers.
docs/architecture.md has the lists, which this script writes; tests/test_step_calls.py holds the numbers as a ceiling.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import textwrap
from collections import Counter
from pathlib import Path
from typing import Any

from keep import keep

ROOT = Path(__file__).parents[1]
TRACING = Path(__file__).parent / "tracing"
PAGE = ROOT / "docs" / "architecture.md"
STEADY = slice(20, 40)  # steps of the first epoch, none of which is logged
PROGRAMS = {
    "job, one worker": ["--devices", "1xcpu", "--epochs", "1", "mnist-mlp"],
    "job, two workers": ["--devices", "2xcpu", "--epochs", "1", "mnist-mlp"],
    "script by rank, one worker": ["--devices", "1xcpu", "tests/programs/mnist_by_rank.py"],
    "script by rank, two workers": ["--devices", "2xcpu", "tests/programs/mnist_by_rank.py"],
    "script, one worker": ["--devices", "1xcpu", "examples/01_mnist.py", "--epochs", "1"],
    "script, two workers": ["--devices", "2xcpu", "examples/01_mnist.py", "--epochs", "1"],
}
LISTED = {
    "STEP_JOB": "job, two workers",
    "STEP_RANK": "script by rank, two workers",
    "STEP_SCRIPT": "script, two workers",
}
FIGURES = ("files", "functions", "lines", "calls of ours", "calls of the library for ours")


def trace(words: list[str], whole: bool = True) -> list[dict[str, Any]]:
    """Run a program until its step 40 and give what each of its processes entered, the launcher first. whole: its start
    too, which takes longer."""
    with tempfile.TemporaryDirectory() as results:
        path = os.pathsep.join([str(TRACING), str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])
        environment = {"PYTHONPATH": path, "PATH_RESULTS": results, "PATH_STEPS": str(STEADY.stop)}
        environment |= {} if whole else {"PATH_FROM_THE_ENGINE_ON": "1"}
        command = [sys.executable, "-m", "meshwise", "run", "--out", f"{results}/runs", *words]
        subprocess.run(command, check=False, cwd=ROOT, env=os.environ | environment, capture_output=True)  # stopped
        facts = [json.loads(file.read_text()) for file in Path(results).glob("*.json")]
    return sorted(facts, key=lambda process: min((first(calls) for calls in process["entered"].values()), default=0.0))


def first(calls: dict[str, float]) -> float:
    """When a file was entered, of the times at which its functions were called first."""
    return min(calls.values())


def steady_step(processes: list[dict[str, Any]]) -> dict[str, Any]:
    """What a step of a worker calls at least: the five figures, and each function as `[file, name, calls, lines]`."""
    worker = next(process for process in processes if process["steps"])
    step = min(
        worker["steps"][STEADY], key=lambda step: len(step["library"]) + sum(row[2] for row in step["functions"])
    )
    functions = [row for row in step["functions"] if not row[0].startswith("training/jobs/")]  # the program's own
    numbers = (
        len({file for file, *_ in functions}),
        len(functions),
        sum(lines for *_, lines in functions),
        sum(calls for _, _, calls, _ in functions),
        len(step["library"]),
    )
    return dict(zip(FIGURES, numbers, strict=True)) | {
        "entered": functions,
        "library": dict(Counter(step["library"]).most_common()),
    }


def until_the_first_step(processes: list[dict[str, Any]]) -> list[str]:
    """The files until the first step of a worker ends, in the order in which they are entered."""
    end = min(process["first step"][0] for process in processes if process["first step"])
    times: dict[str, float] = {}
    for process in processes:
        for file, calls in process["entered"].items():
            if first(calls) <= end and file != "__main__.py":  # which stands before cli.main
                times[file] = min(first(calls), times.get(file, end))
    return sorted(times, key=lambda file: times[file])


def row(figures: dict[str, Any]) -> str:
    """The figures as one line."""
    return ", ".join(f"{figures[name]} {name}" for name in FIGURES)


def files_of(figures: dict[str, Any]) -> str:
    """The list of docs/architecture.md: the number, and the files in the order in which they are entered."""
    files = list(dict.fromkeys(file for file, *_ in figures["entered"]))
    words = f"{len(files)} files: " + ", ".join(f"`{file}`" for file in files)
    return textwrap.fill(words, 120, break_long_words=False, break_on_hyphens=False)


def write_page(result: dict[str, Any], page: Path = PAGE) -> None:
    """Put the lists of two workers into docs/architecture.md."""
    text = page.read_text()
    for mark, name in LISTED.items():
        listed = (
            f"<!-- {mark} -->\n{files_of(result[name]['a steady step'])}\n\n{figures_of(result[name])}\n<!-- end -->"
        )
        text = re.sub(rf"<!-- {mark} -->.*?<!-- end -->", lambda _, new=listed: new, text, flags=re.S)
    page.write_text(text)


def figures_of(found: dict[str, Any]) -> str:
    """The figures as a line of the page."""
    return f"{row(found['a steady step'])}; {len(found['to the first step'])} files to the end of the first step."


def main() -> None:
    """Trace, print, keep, and write the page."""
    result: dict[str, Any] = {}
    for name, words in PROGRAMS.items():
        processes = trace(words)
        step, start = steady_step(processes), until_the_first_step(processes)
        print(f"{name}, a steady step: {row(step)}")
        for file, function, calls, lines in step["entered"]:
            print(f"  {calls:>3} × {file:<36} {function} ({lines} lines)")
        print(f"  library: {step['library']}")
        print(f"{name}, from cli.main to the end of the first step: {len(start)} files\n")
        result[name] = {"a steady step": step, "to the first step": start}
    write_page(result)
    for step in (found["a steady step"] for found in result.values()):
        entered = step["entered"]
        step["entered"] = [f"{calls} x {file} {function}, {lines} lines" for file, function, calls, lines in entered]
    keep("path", result)


if __name__ == "__main__":
    main()
