"""What `meshwise check` says of scripts of DDP and accelerate that know nothing of it.

    python bench/check_others.py [--only WORD] [--folder FOLDER]

Ten kinds of mistake in scripts of either, and clean ones: bench/others, planted by somebody who had not read the
checker (CASES.toml: what should be found, and in which lines). What the first play of the list said stays in the
result, as `first`. `--folder`: published scripts, each printed with what is found.
Claims: at least 85 % of the mistakes are named with a line; nothing is called wrong in clean scripts.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
import tomllib
from collections import Counter
from pathlib import Path
from typing import Any

from keep import RESULTS, keep

OTHERS = Path(__file__).parent / "others"
KEPT = RESULTS / "check_others.json"
KINDS = {
    "unequal_tokens": ("mean over unequal counts",),
    "batch_grows": ("batch size is per device", "learning rate depends on the devices"),
    "no_set_epoch": ("set_epoch is missing",),
    "same_samples": ("all ranks read the same samples",),
    "evaluation_padded": ("samples counted twice in the evaluation", "metric differs from one device's"),
    "evaluation_dropped": ("samples left out of the evaluation", "metric differs from one device's"),
    "batch_norm": ("batch norm per rank",),
    "clip_early": ("clipping before the reduction", "a hook before the reduction"),
}
"""Findings that name a kind; of a kind that is not here any finding in the right line does."""


def check(script: Path) -> dict[str, Any]:
    """What a check of this script says, as JSON, and how long it took."""
    began = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-m", "meshwise", "check", "--json", script.name],
        cwd=script.parent, env=os.environ, capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip
    said: dict[str, Any] = {"exit": done.returncode, "seconds": round(time.monotonic() - began, 1)}
    if done.stdout.startswith("{"):
        found = json.loads(done.stdout)
        return {**said, **{key: found[key] for key in ("verdict", "steps", "largest", "findings", "not_judged")}}
    return {**said, "verdict": "refused", "why": done.stderr.strip().splitlines()[-1:], "findings": []}


def lines_of(finding: dict[str, Any]) -> set[int]:
    """The lines that a finding names."""
    return {int(place.rpartition(":")[2]) for place in finding["places"]}


def score(case: dict[str, Any], said: dict[str, Any]) -> dict[str, Any]:
    """Whether the verdict is right, and whether a finding names the mistake and its line."""
    accepted = {case["expected"], *case.get("accept", ())}
    wrong = [each for each in said["findings"] if each["wrong"]]
    verdict = "wrong" if wrong else "clean" if said["verdict"] == "equal" else said["verdict"]
    if case["expected"] == "clean":
        return {"right": verdict == "clean", "named": None}
    kinds = KINDS.get(case["kind"])
    named = [
        each
        for each in said["findings"]
        if lines_of(each) & set(case["lines"]) and (kinds is None or each["kind"] in kinds)
    ]
    design = "design" in accepted and verdict == "clean" and bool(named)
    return {"right": verdict in accepted or design, "named": bool(named)}


def main() -> None:
    """Play the list, print a row a script, keep."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", default="", help="scripts with this word in their name or kind")
    parser.add_argument("--folder", type=Path, help="published scripts instead")
    options = parser.parse_args()
    result: dict[str, Any] = json.loads(KEPT.read_text()) if KEPT.exists() else {}
    rows, first = result.get("scripts", {}), result.get("first", {})
    published = result.get("published", {}) if options.only or options.folder is None else {}
    if options.folder is not None:
        for script in sorted(options.folder.glob("*.py")):
            if options.only in script.name:
                said = published[script.name] = check(script)
                print(f"{script.name:36} {said['verdict']:10} {said['seconds']:6} s", *said.get("why", ()), flush=True)
                for each in said["findings"]:
                    print("    ", "wrong " if each["wrong"] else "design", each["kind"], *each["places"])
    else:
        for case in tomllib.loads((OTHERS / "CASES.toml").read_text(encoding="utf-8"))["case"]:
            if options.only not in f"{case['file']} {case['kind']}":
                continue
            said = check(OTHERS / case["file"])
            scored = score(case, said)
            row = {"kind": case["kind"], "wrapper": case["wrapper"], "expected": case["expected"], **scored, **said}
            rows[case["file"]] = row
            first.setdefault(case["file"], {"kind": case["kind"], "verdict": said["verdict"], **scored})
            found = "; ".join(f"{each['kind']} ({', '.join(each['places'])})" for each in said["findings"])
            print(f"{case['file']:24} {case['kind']:20} {scored}  {said['seconds']} s  {found}", *said.get("why", ()))
            sys.stdout.flush()
    figures = {
        "mistakes named with a line": _share(rows, "named"),
        "first play": _share(first, "named"),
        "verdicts right": _share(rows, "right"),
        "clean scripts without alarm": _share({n: r for n, r in rows.items() if r["expected"] == "clean"}, "right"),
        "published, by verdict": dict(Counter(each["verdict"] for each in published.values())),
    }
    print(json.dumps(figures, indent=2))
    keep("check_others", {"figures": figures, "scripts": rows, "first": first, "published": published})


def _share(rows: dict[str, Any], what: str) -> str:
    known = [row[what] for row in rows.values() if row[what] is not None]
    return f"{sum(known)} of {len(known)}"


if __name__ == "__main__":
    main()
