"""How many files does one have to read to follow a training step, and how many to follow a run to its first step?

    python bench/path.py

Lists the files of meshwise that `meshwise run mnist-mlp` enters, on one CPU worker and on two: from the read of a batch
to the end of `optimizer.step` in a steady step, and from `cli.main` to the end of the first step, launcher and workers
together. The same for a script, examples/01_mnist.py, of which the first list is everything from one optimizer step to
the next. A file is entered when one of its functions is called, in any thread; imports do not count.

A count to watch, no claim: docs/architecture.md has the lists of a steady step.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

from keep import keep

ROOT = Path(__file__).parents[1]
TRACING = Path(__file__).parent / "tracing"
READ = "jobs/idx.py:Images.batch"
STEADY = slice(20, 40)  # steps of the first epoch, none of which is logged
PROGRAMS = {
    "mnist-mlp, one worker": ["--devices", "1xcpu", "mnist-mlp"],
    "mnist-mlp, two workers": ["--devices", "2xcpu", "mnist-mlp"],
    "a script, two workers": ["--devices", "2xcpu", "examples/01_mnist.py", "--epochs", "1"],
}


def trace(words: list[str]) -> list[dict[str, Any]]:
    """Run a program and give what each of its processes entered, the launcher first."""
    with tempfile.TemporaryDirectory() as results:
        path = os.pathsep.join([str(TRACING), str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])
        read = "" if any(word.endswith(".py") for word in words) else READ
        environment = {"PYTHONPATH": path, "PATH_RESULTS": results, "PATH_READ": read, "PATH_STEPS": str(STEADY.stop)}
        job = ["--epochs", "1"] if read else []
        command = [sys.executable, "-m", "meshwise", "run", "--out", f"{results}/runs", *job, *words]
        subprocess.run(command, check=False, cwd=ROOT, env=os.environ | environment, capture_output=True)  # stopped
        facts = [json.loads(file.read_text()) for file in Path(results).glob("*.json")]
    return sorted(facts, key=lambda process: min((first(calls) for calls in process["entered"].values()), default=0.0))


def first(calls: dict[str, float]) -> float:
    """When a file was entered, of the times at which its functions were called first."""
    return min(calls.values())


def steady_step(processes: list[dict[str, Any]]) -> dict[str, list[str]]:
    """The files of a steady step with the functions called in them: what most steps of rank 0 have."""
    worker = next(process for process in processes if process["steps"])
    windows = [json.dumps(step) for step in worker["steps"][STEADY]]
    return dict(json.loads(Counter(windows).most_common(1)[0][0]))


def until_the_first_step(processes: list[dict[str, Any]]) -> dict[str, list[str]]:
    """The files until the first step of a worker ends, in the order in which they are entered: launcher, worker."""
    end = min(process["first step"][0] for process in processes if process["first step"])
    found: dict[str, list[str]] = {}
    for process in processes:
        who = "worker" if process["steps"] else "launcher"
        for file, calls in sorted(process["entered"].items(), key=lambda pair: first(pair[1])):
            functions = [function for function, time in calls.items() if time <= end]
            if functions and file != "__main__.py":  # which stands before cli.main
                found.setdefault(file, []).append(f"{who}: {', '.join(functions)}")
    return {file: list(dict.fromkeys(calls)) for file, calls in found.items()}


def show(title: str, files: dict[str, list[str]]) -> None:
    """Print a list of files."""
    print(f"\n{title}: {len(files)} files")
    for file, calls in files.items():
        print(f"  {file:<34} {', '.join(calls)}")


def main() -> None:
    """Trace, print, keep."""
    result: dict[str, Any] = {}
    for name, words in PROGRAMS.items():
        processes = trace(words)
        step, start = steady_step(processes), until_the_first_step(processes)
        show(f"{name}, a steady step", step)
        show(f"{name}, from cli.main to the end of the first step", start)
        result[name] = {
            "files of a steady step": len(step),
            "files to the first step": len(start),
            "a steady step": list(step),
            "to the first step": list(start),
        }
    print()
    keep("path", result)


if __name__ == "__main__":
    main()
