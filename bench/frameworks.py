"""Published scripts on one, two and three devices, and resumed, beside the same script on one.

    python bench/frameworks.py ORIGINALS [--only WORD] [--anew]

ORIGINALS: a folder with the repositories of `frameworks_scripts.py`, `frameworks_trainer.py` and
`frameworks_accelerate.py` at their commits, each under its own name; foreign code is run and never kept here.
Everything is float64, on CPU workers with one thread each; downloads and plots are replaced (`frameworks_probe.py` and
its like). The norm of the gradient and the loss of each step, the metrics of each epoch, fit and test, and the weights
at the end are compared: of plain python and one device with meshwise, where nothing is drawn in a step; of one device
with meshwise and two, three, and two that are stopped by Ctrl-C and go on as three. What is computed in float32 (an
accuracy of torchmetrics, a loss that is logged) may be 1e-6 apart.

Claim: every script has the figures of one device within 1e-9 (relative), or is refused by name; none is wrong, hangs or
ends in a traceback.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

from foreign import ROOT, edited, installed, sentence, started, weights_apart
from frameworks_accelerate import SCRIPTS as OF_ACCELERATE
from frameworks_probe import STOP, write_folders
from frameworks_scripts import MW, SCRIPTS, Edit, Script
from frameworks_trainer import SCRIPTS as OF_TRAINER
from keep import RESULTS, keep

BOUND = 1e-9
PLAIN, ONE, RESUMED = "plain", "1", "2, stopped, then 3"
PAIRS = (PLAIN, ONE, "2", "3", RESUMED)
VERSIONS = (
    "torch",
    "lightning",
    "torchmetrics",
    "torchvision",
    "transformers",
    "trl",
    "peft",
    "accelerate",
    "datasets",
    "timm",
)


def prepared(script: Script, originals: Path, folder: Path, pair: str) -> dict[str, dict[str, int]]:
    """The script in a folder of its own; gives the lines that were replaced, and those that meshwise asked for."""
    folder.mkdir(parents=True)
    name = Path(script.path).name
    source = (originals / script.source[0].partition("/")[2] / script.path).parent
    for each in (name, *script.beside):
        shutil.copy(source / each, folder)
    for each in (f"{script.probe}.py", "torchvision_ops.py"):
        shutil.copy(Path(__file__).with_name(each), folder)
    if script.folders:
        write_folders(str(folder / "pictures"))
    for write in script.made:
        write(folder)
    file = folder / name
    beside = edited(folder, script.small_beside)
    lines = {"small": {word: count + beside[word] for word, count in replaced(file, script.small).items()}}
    replaced(file, script.shown)
    if pair != PLAIN:
        lines["ours"] = replaced(file, script.ours)
        lines["ours"]["added"] += 1
    if pair == RESUMED:
        lines["kept"] = replaced(file, script.kept)
    begin = ["import torch", "torch.set_default_dtype(torch.float64)", "torch.manual_seed(0)"]
    begin += [f"import {script.probe}; {script.probe}.begin({script.package!r})"]
    begin += [MW] if pair != PLAIN else []
    file.write_text("\n".join([*begin, file.read_text()]))
    return lines


def replaced(file: Path, edits: Iterable[Edit]) -> dict[str, int]:
    """Edit a file, `…` standing for all that lies between; gives the lines of code added and removed."""
    lines = {"added": 0, "removed": 0}
    for old, new in edits:
        text, end = file.read_text(), 0
        words = old.split("…")
        begin = text.find(words[0])
        for word in words:
            end = text.find(word, max(end, begin))
            end = end + len(word) if end >= 0 else sys.exit(f"{file} has nowhere {word!r}. It is another version.")
        more = edited(file.parent, ((file.name, text[begin:end], new),))
        lines = {word: lines[word] + more[word] for word in lines}
    return lines


def run(script: Script, pair: str, originals: Path, folder: Path) -> dict[str, Any]:
    """A pair: its exit codes, what it printed, and what it told."""
    lines = prepared(script, originals, folder, pair)
    words = [Path(script.path).name, *script.arguments.split()]
    if pair == PLAIN:
        words[1:1] = script.subcommand.split()
        code, output = started([sys.executable, *words], folder, ROOT / "src")
        return {"codes": [code], "output": output, "told": told(folder), "lines": lines}
    command = [sys.executable, "-m", "meshwise", "run", "--out", "runs", *script.options.split()]
    if pair != RESUMED:
        code, output = started([*command, "--devices", f"{pair}xcpu", *words], folder, ROOT / "src")
        return {"codes": [code], "output": output, "told": told(folder), "lines": lines}
    os.environ[STOP] = str(script.stop)
    hold = ["--fault", f"slow 300ms:rank=0,step={script.stop}"]  # so that the signal comes before the end
    code, output = started([*command, "--devices", "2xcpu", *hold, *words], folder, ROOT / "src", script.stop)
    del os.environ[STOP]
    (folder / "probe.jsonl").unlink(missing_ok=True)
    for each in folder.glob("weights-*.pt"):
        each.unlink()
    again, more = started([*command, "--devices", "3xcpu", *words], folder, ROOT / "src")
    return {"codes": [code, again], "output": f"{output}\n{more}", "told": told(folder), "lines": lines}


def told(folder: Path) -> list[dict[str, Any]]:
    """What the probe has written."""
    path = folder / "probe.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def numbers(line: dict[str, Any]) -> dict[str, float]:
    """Those of a line, by name."""
    flat = {key: value for key, value in line.items() if not isinstance(value, dict)}
    return flat | {
        f"{key} {name}": x for key, value in line.items() if isinstance(value, dict) for name, x in value.items()
    }


def apart(one: list[dict[str, Any]], other: list[dict[str, Any]]) -> tuple[float | None, str]:
    """The largest relative difference and its name, of float32 a thousandth; None where other things were told."""
    largest, where = 0.0, ""
    if len(one) != len(other):
        return None, f"{len(one)} and {len(other)} lines"
    rounded = BOUND / 1e-6  # what a metric of torchmetrics gives in float32
    for a, b in zip(map(numbers, one), map(numbers, other), strict=True):
        if a.keys() != b.keys():
            return None, f"{sorted(a.keys() ^ b.keys())}"
        for name in a:
            by = (
                abs(a[name] - b[name])
                / max(abs(a[name]), 1e-12)
                * (rounded if "float32" in name or name.endswith("acc") else 1)
            )
            if not by <= largest and not (a[name] != a[name] and b[name] != b[name]):
                largest, where = by, f"{name} at step {a.get('step', '–')}"
    return largest, where


def judged(script: Script, pair: str, done: dict[str, Any], reference: dict[str, Any], at: tuple[Path, Path]) -> Any:
    """The outcome of a pair, and its figures."""
    codes, output = done["codes"], done["output"]
    if -1 in codes:
        return {"outcome": "HANG", "said": output[-1500:]}
    if pair == RESUMED and codes != [130, 0]:
        return {"outcome": "WRONG", "codes": codes, "said": output[-2500:]}
    if codes[-1]:
        said = re.sub(r"/\S*/(?=lightning/pytorch)", "", sentence(output))
        refused = bool(script.refused) and script.refused in output
        return {"outcome": "refused" if refused else "CRASH", "said": said if refused else output[-2500:]}
    mine, want = done["told"], reference["told"]
    if pair == RESUMED:
        want = since(mine, want)
    unlike, why = script.unlike if pair == ONE else ("", "")
    largest, where = apart(without(want, unlike), without(mine, unlike))
    names = sorted(path.name for path in at[0].glob("weights-*.pt"))
    weights = [weights_apart(at[0] / name, at[1] / name) for name in names]
    found = {"told": len(mine), "apart": largest, "where": where, "weights apart": max(weights, default=0.0)
             if None not in weights else None}  # fmt: skip
    if pair == ONE and (script.options or script.draws):
        return {"outcome": "other draws"}
    right = all(found[key] is not None and found[key] <= BOUND for key in ("apart", "weights apart"))
    return {
        "outcome": "equal" if right else "WRONG",
        **found,
        **({"but for": unlike, "why": why} if why else {}),
        **({} if right else {"said": output[-1500:]}),
    }


def without(told: list[dict[str, Any]], name: str) -> list[dict[str, Any]]:
    """All but one name."""
    return [
        {k: {n: y for n, y in x.items() if n != name} if isinstance(x, dict) else x for k, x in line.items()}
        for line in told
    ]


def since(mine: list[dict[str, Any]], want: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The lines of a whole run that one tells too which goes on; the means of the epoch that was cut left out."""
    begin = len(want) - len(mine)
    want = [dict(line) for line in want[max(begin, 0) :]]
    if len(mine) != len(want):
        return want
    epochs = 0
    for own, line in zip(mine, want, strict=True):
        epochs += "epoch" in own
        if "test" in own and epochs < 2:  # what was logged before the run was cut is not there, as in Lightning itself
            lost = {n for n in line["test"].keys() - own["test"].keys() if not epochs or n.endswith("_epoch")}
            line["test"] = {n: x for n, x in line["test"].items() if n not in lost}
            own["test"] = {n: x for n, x in own["test"].items() if epochs or n in line["test"]}
    for own, line in zip(mine, want, strict=True):  # `train_loss`, and the tokens that TRL counts, are of its own steps
        for key in ("log", "metrics") if "epoch" not in line else ():
            own[key], line[key] = (
                {n: x for n, x in each.get(key, {}).items() if not (n.startswith("train_") or n.endswith("num_tokens"))}
                for each in (own, line)
            )
    cut = next((i for i, line in enumerate(want) if "epoch" in line), None)
    for line in (want[cut], mine[cut]) if cut is not None else ():
        kept = {n: x for n, x in line["metrics"].items() if not n.startswith("train") and not n.endswith("epoch")}
        line["metrics"] = kept
    return want


def main() -> None:
    """Measure, keep after each pair, print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("originals", type=Path)
    parser.add_argument("--only", default="", help="scripts with this in their name")
    parser.add_argument("--anew", action="store_true", help="run known pairs again")
    given = parser.parse_args()
    found: dict[str, Any] = known()["scripts"]
    for name, script in (SCRIPTS | OF_TRAINER | OF_ACCELERATE).items():
        if given.only not in name:
            continue
        one = found.setdefault(name, {"source": f"{script.source[0]} {script.path} at {script.source[1]}", "pairs": {}})
        with tempfile.TemporaryDirectory(prefix="frameworks") as folder:
            measure(script, given, Path(folder), one, partial(keep_script, name, one))
    for name, one in known()["scripts"].items():
        print(f"{name:30}", {pair: (each["outcome"], each.get("apart")) for pair, each in one["pairs"].items()})


def known() -> dict[str, Any]:
    """What is measured already."""
    path = RESULTS / "frameworks.json"
    result: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    result.pop("machine", None)
    result.setdefault("scripts", {})
    return result


def keep_script(name: str, one: dict[str, Any]) -> None:
    """Write what is known of a script, beside what others write who measure at the same time."""
    with (Path(tempfile.gettempdir()) / "frameworks.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        result = known()
        result["claim"] = " ".join((__doc__ or "").partition("Claim: ")[2].split())
        result["versions"] = {each: installed(each) for each in VERSIONS} | {"python": sys.version.split()[0]}
        result["scripts"][name] = one
        keep("frameworks", result)


def measure(script: Script, given: argparse.Namespace, at: Path, one: dict[str, Any], kept: Any) -> None:
    """The pairs of a script that are not known yet."""
    done: dict[str, Any] = {}
    if not given.anew and all(pair in one["pairs"] for pair in PAIRS):
        return
    for pair in PAIRS:
        if pair == RESUMED and not script.kept:
            one["pairs"].pop(pair, None)
            kept()
            continue
        folder = at / pair.replace(", ", "-") / "here"
        done[pair] = run(script, pair, given.originals.resolve(), folder)
        if pair == PLAIN:
            right = done[pair]["codes"] == [0] and done[pair]["told"]
            verdict: Any = {"outcome": "ran" if right else "CRASH"} | (
                {} if right else {"said": done[pair]["output"][-2500:]}
            )
        else:
            beside = PLAIN if pair == ONE else ONE
            verdict = judged(script, pair, done[pair], done[beside], (at / beside / "here", folder))
        one["pairs"][pair] = verdict
        one.setdefault("lines of code", {}).update(done[pair]["lines"])
        print(script.path, pair, verdict, flush=True)
        kept()
        if verdict["outcome"] == "CRASH" and pair == PLAIN:
            return


if __name__ == "__main__":
    main()
