"""The public array API suite (github.com/data-apis/array-api-tests), with every array split over virtual devices.

    python bench/array_api.py SUITE [--examples 100] [--places 2 3] [--passes one sharded guarded] [-k WORDS]
                              [--kept FOLDER]

SUITE: a clone of it with its submodule; its requirements and array-api-compat are installed. `one` is
array_api_compat.torch on one device, what `sharded` is held against; `guarded` forbids hidden gathers
(`mw.guard("error")`). Each pass has the same seed. `--kept` goes on behind the passes that are in the folder: one
takes half an hour and more with 100 examples. Skips and expected failures count as failures.

Goals: every test that `one` passes passes sharded, and half of those that it fails; guarded, 85 % of the functions.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

from keep import keep

SEED = 2026
HERE = Path(__file__).parents[1] / "tests" / "programs"


def outcomes(suite: Path, module: str, examples: int, words: str, environment: dict[str, str]) -> dict[str, str]:
    """`passed`, or what else became of each test, with the last line of its error."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.json")
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "array_api_tests"]
        command += [f"--max-examples={examples}", "--disable-deadline", f"--hypothesis-seed={SEED}", "--tb=line"]
        command += ["--json-report", f"--json-report-file={report}", "--json-report-omit=keywords,streams"]
        path = os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")])
        own = {"ARRAY_API_TESTS_MODULE": module, "ARRAY_API_TESTS_VERSION": "2025.12", "PYTHONPATH": path}
        if words:
            command += ["-k", words]
        subprocess.run(command, cwd=suite, env=os.environ | own | environment, stdout=subprocess.DEVNULL, check=False)
        rows = json.loads(report.read_text())["tests"]
    return {row["nodeid"]: "passed" if row["outcome"] == "passed" else _why(row) for row in rows}


def _why(row: dict[str, Any]) -> str:
    for stage in ("setup", "call", "teardown"):
        if crash := row.get(stage, {}).get("crash"):
            return f"{row['outcome']}: {crash['message'].splitlines()[0][:200]}"
    return str(row["outcome"])


def function_of(test: str) -> str:
    """The function of the standard that a test is about."""
    found = re.search(r"\[(?:__)?i?([a-z_0-9]+?)(?:__)?[\(\[-]", test) or re.search(r"::test_([a-z_0-9]+)", test)
    return found[1] if found else test


def main() -> None:
    """Run the passes, compare, print, keep."""
    parser = argparse.ArgumentParser()
    parser.add_argument("suite", type=Path)
    parser.add_argument("--examples", type=int, default=100)
    parser.add_argument("--places", type=int, nargs="+", default=[2, 3])
    parser.add_argument("--passes", nargs="+", default=["one", "sharded", "guarded"])
    parser.add_argument("-k", dest="words", default="")
    parser.add_argument("--kept", type=Path)
    asked = parser.parse_args()
    found: dict[str, dict[str, str]] = {}
    for name in asked.passes:
        for places in [1] if name == "one" else asked.places if name == "sharded" else asked.places[:1]:
            begin = time.monotonic()
            module = "array_api_compat.torch" if name == "one" else "array_api_sharded"
            environment = {"PLACES": str(places)} | ({"GUARD": "error"} if name == "guarded" else {})
            kept = asked.kept and asked.kept / f"{name}-{places}-{asked.examples}{asked.words}.json"
            if kept and kept.exists():
                own = json.loads(kept.read_text())
            else:
                own = outcomes(asked.suite, module, asked.examples, asked.words, environment)
                if kept:
                    kept.parent.mkdir(parents=True, exist_ok=True)
                    kept.write_text(json.dumps(own))
            passed = sum(value == "passed" for value in own.values())
            print(f"{name} {places}: {passed} of {len(own)} passed, {time.monotonic() - begin:.0f} s", flush=True)
            found[f"{name} {places}"] = own
    result: dict[str, Any] = {"examples": asked.examples, "seed": SEED, "passes": {}}
    result["suite"] = subprocess.run(
        ["git", "-C", str(asked.suite), "rev-parse", "HEAD"], capture_output=True, text=True, check=False
    ).stdout.strip()
    one = found.get("one 1", {})
    for name, own in found.items():
        row = {"tests": len(own), "passed": sum(value == "passed" for value in own.values())}
        if name.startswith("sharded") and one:
            lost = {test: own.get(test, "absent") for test in one if one[test] == "passed" != own.get(test)}
            gained = [test for test in one if one[test] != "passed" == own.get(test)]
            failing = sum(value != "passed" for value in one.values())
            row |= {"lost": lost, "gained": gained, "of those that one device fails": f"{len(gained)} of {failing}"}
            print(f"{name}: lost {len(lost)}, gained {len(gained)} of {failing}")
        if name.startswith("guarded"):
            groups: dict[str, list[str]] = defaultdict(list)
            for test, value in own.items():
                groups[function_of(test)].append(value)
            gathers = sorted(key for key, values in groups.items() if any("gather" in value for value in values))
            row |= {"functions": len(groups), "with a hidden gather": gathers}
            print(f"{name}: {len(groups) - len(gathers)} of {len(groups)} functions without a hidden gather")
        row["failed"] = {test: value for test, value in own.items() if value != "passed"}
        result["passes"][name] = row
    if not asked.words:
        short = {
            name: {word: value for word, value in row.items() if word not in ("failed", "gained")}
            for name, row in result["passes"].items()
        }
        keep("array_api", result | {"passes": short}, result)
    else:
        print(json.dumps({name: kept["failed"] for name, kept in result["passes"].items()}, indent=1))


if __name__ == "__main__":
    main()
