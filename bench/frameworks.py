"""Published scripts of Lightning, transformers, TRL and peft have one device's numbers on two and three devices.

    python bench/frameworks.py ORIGINALS [--only WORD] [--anew]

ORIGINALS: a folder with the repositories of tests/programs/frameworks/scripts.toml at their commits, each under its own
name; foreign code is run and never kept here. Everything is float64, on CPU workers with one thread each; downloads and
plots are replaced (the probes beside it). The norm of the gradient and the loss of each step, the metrics of each
epoch, fit and test, and the weights at the end are compared: of plain python and one device with meshwise, where
nothing is drawn in a step, and of one device with meshwise and two, three. What is computed in float32 (an accuracy of
torchmetrics, a loss that is logged) may be 1e-6 apart.

Claim: every script has the figures of one device within 1e-9 (relative), or is refused by name; none is wrong, hangs or
ends in a traceback.
"""

from __future__ import annotations

import argparse
import importlib
import json
import math
import re
import shutil
import sys
import tempfile
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from foreign import ROOT, edited, installed, sentence, short, started, weights_apart
from keep import keep, kept

Edits = tuple[tuple[str, str], ...]
BOUND = 1e-9
PLAIN, ONE = "plain", "1"
PAIRS = (PLAIN, ONE, "2", "3")
PLACE = ROOT / "tests" / "programs" / "frameworks"
VERSIONS = ("torch", "lightning", "torchmetrics", "torchvision", "transformers", "trl", "peft", "accelerate")


@dataclass(frozen=True)
class Script:
    """A table of scripts.toml, which says what each word is."""

    source: str
    commit: str
    path: str
    package: str
    ours: Edits
    small: Edits = ()
    arguments: str = ""
    options: str = ""
    subcommand: str = ""
    draws: bool = False
    refused: str = ""
    beside: tuple[str, ...] = ()
    small_beside: tuple[tuple[str, str, str], ...] = ()
    made: tuple[Any, ...] = ()
    unlike: tuple[str, str] = field(default=("", ""))


SCRIPTS = {name: Script(**each) for name, each in tomllib.loads((PLACE / "scripts.toml").read_text()).items()}


def prepared(script: Script, originals: Path, folder: Path, pair: str) -> None:
    """The script in a folder of its own."""
    folder.mkdir(parents=True)
    name = Path(script.path).name
    source = (originals / script.source.partition("/")[2] / script.path).parent
    for each in (name, *script.beside):
        shutil.copy(source / each, folder)
    probe = "trainer_probe" if script.package == "transformers" else "lightning_probe"
    for file in (PLACE / f"{probe}.py", PLACE.parent / "models" / "torchvision_ops.py"):
        shutil.copy(file, folder)
    for made, *options in script.made:
        getattr(importlib.import_module("tests.programs.frameworks.data"), made)(folder, **dict(*options))
    edited(folder, script.small_beside)
    replaced(folder / name, script.small if pair == PLAIN else (*script.small, *script.ours))
    begin = ["import torch", "torch.set_default_dtype(torch.float64)", "torch.manual_seed(0)"]
    begin += [f"import {probe}; {probe}.begin({script.package!r})"]
    begin += ["import meshwise as mw"] if pair != PLAIN else []
    (folder / name).write_text("\n".join([*begin, (folder / name).read_text()]))


def replaced(file: Path, edits: Iterable[tuple[str, str]]) -> None:
    """Edit a file, `…` standing for all that lies between."""
    for old, new in edits:
        text, end = file.read_text(), 0
        words = old.split("…")
        begin = text.find(words[0])
        for word in words:
            end = text.find(word, max(end, begin))
            end = end + len(word) if end >= 0 else sys.exit(f"{file} has nowhere {word!r}. It is another version.")
        edited(file.parent, ((file.name, text[begin:end], new),))


def run(script: Script, pair: str, originals: Path, folder: Path) -> dict[str, Any]:
    """A pair: its exit code, what it printed, and what its probe has written."""
    prepared(script, originals, folder, pair)
    words = [Path(script.path).name, *script.arguments.split()]
    if pair == PLAIN:
        command = [sys.executable, words.pop(0), *script.subcommand.split()]
    else:
        command = [sys.executable, "-m", "meshwise", "run", "--out", "runs", *script.options.split()]
        command += ["--devices", f"{pair}xcpu"]
    code, output = started([*command, *words], folder)
    path = folder / "probe.jsonl"
    told = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return {"code": code, "output": output, "told": told}


def numbers(line: Mapping[str, Any], unlike: str) -> dict[str, float]:
    """Those of a line, by name, but one."""
    flat = {key: value for key, value in line.items() if not isinstance(value, dict)}
    nested = [(key, inner) for key, inner in line.items() if isinstance(inner, dict)]
    return flat | {f"{key} {name}": x for key, inner in nested for name, x in inner.items() if name != unlike}


def apart(one: list[dict[str, Any]], other: list[dict[str, Any]], unlike: str) -> tuple[float | None, str]:
    """The largest relative difference and its name, of float32 a thousandth; None where other things were told."""
    largest, where = 0.0, ""
    if len(one) != len(other):
        return None, f"{len(one)} and {len(other)} lines"
    for a, b in ((numbers(x, unlike), numbers(y, unlike)) for x, y in zip(one, other, strict=True)):
        if a.keys() != b.keys():
            return None, f"{sorted(a.keys() ^ b.keys())}"
        for name in a:
            rounded = BOUND / 1e-6 if "float32" in name or name.endswith("acc") else 1  # what torchmetrics gives
            by = abs(a[name] - b[name]) / max(abs(a[name]), 1e-12) * rounded
            if not by <= largest and not (math.isnan(a[name]) and math.isnan(b[name])):
                largest, where = by, f"{name} at step {a.get('step', '–')}"
    return largest, where


def judged(script: Script, pair: str, done: dict[str, Any], reference: dict[str, Any], at: tuple[Path, Path]) -> Any:
    """The outcome of a pair, and its figures."""
    output = done["output"]
    if pair == PLAIN:
        right = done["code"] == 0 and done["told"]
        return {"outcome": "ran"} if right else {"outcome": "CRASH", "said": output[-2500:]}
    if done["code"] == -1:
        return {"outcome": "HANG", "said": output[-1500:]}
    if done["code"]:
        if script.refused and script.refused in output:
            return {"outcome": "refused", "said": re.sub(r"/\S*/(?=lightning/pytorch)", "", sentence(output))}
        return {"outcome": "CRASH", "said": output[-2500:]}
    if pair == ONE and (script.options or script.draws):
        return {"outcome": "other draws"}
    unlike, why = script.unlike if pair == ONE else ("", "")
    largest, where = apart(reference["told"], done["told"], unlike)
    names = sorted(path.name for path in at[0].glob("weights-*.pt"))
    weights = [weights_apart(at[0] / name, at[1] / name) for name in names]
    most = None if None in weights else max(weights, default=0.0)  # type: ignore[type-var]
    found = {"losses apart": largest, "where": where, "weights apart": most, **({"why": why} if why else {})}
    right = all(by is not None and by <= BOUND for by in (largest, most))
    return {"outcome": "equal", **found} if right else {"outcome": "WRONG", **found, "said": output[-1500:]}


def main() -> None:
    """Measure, keep after each pair, print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("originals", type=Path)
    parser.add_argument("--only", default="", help="scripts with this in their name")
    parser.add_argument("--anew", action="store_true", help="run known pairs again")
    given = parser.parse_args()
    found = kept("frameworks")
    about = {"claim": " ".join((__doc__ or "").partition("Claim: ")[2].split())}
    about |= {"versions": {each: installed(each) for each in VERSIONS}}  # type: ignore[dict-item]
    for name, script in SCRIPTS.items():
        one = found.setdefault(name, {"commit": f"{script.source} {script.commit}", "pairs": {}})
        if given.only not in name or (not given.anew and all(pair in one["pairs"] for pair in PAIRS)):
            continue
        done: dict[str, Any] = {}
        with tempfile.TemporaryDirectory(prefix="frameworks") as folder:
            at = {pair: Path(folder) / pair / "here" for pair in PAIRS}
            for pair in PAIRS:
                beside = PLAIN if pair in (PLAIN, ONE) else ONE
                done[pair] = run(script, pair, given.originals.resolve(), at[pair])
                told = judged(script, pair, done[pair], done[beside], (at[beside], at[pair]))
                one["pairs"][pair] = told
                print(name, pair, told, flush=True)
                keep("frameworks", about | short(found), found)
                if told["outcome"] == "CRASH" and pair == PLAIN:
                    break


if __name__ == "__main__":
    main()
