"""Training scripts that nobody here wrote have plain python's numbers, with the lines that the README asks for.

    python bench/foreign.py ORIGINALS [--only WORD] [--pairs 2 "tensor=2"] [--anew] [--whole]

ORIGINALS: a folder with the repositories of tests/programs/foreign/scripts.toml at their commits, each under its own
name; foreign code is run and never kept here. Everything is float64, on CPU workers with one thread each. A pair is a
script and a way to run it: plain python without meshwise, 1, 2 and 3 devices, and two devices under `shard=2` and
`tensor=2`. Each is kept as soon as it has ended, and is not run again. Scripts that draw noise or masks run with
`--exact-random` on several devices, beside one device that draws so.

`--whole`: with `view="whole"` and the line of `mw.distribute` alone, on 1, 2 and 3 devices beside plain python; all
else is the original's, draws and `torch.save` too. Results go to foreign_whole.json.

Claim: every pair has plain python's losses, and weights where the script saves a state_dict, within 1e-9 (relative), or
within a stated bound for a stated reason, or is refused with a sentence; none is wrong, hangs or ends in a traceback.
"""

from __future__ import annotations

import argparse
import difflib
import importlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from keep import keep, kept

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))
Edit = tuple[str, str, str]  # the file, the old text, the new
BOUND, LIMIT = 1e-9, 400.0
PLAIN, DRAWN = "plain", "1, exact draws"
FAILED = re.compile(r"(rank|all) .* failed: (?!UsageError)")  # as a last line: the program's own error without a remedy
PAIRS: dict[str, list[str]] = {
    PLAIN: [],
    **{str(n): ["--devices", f"{n}xcpu"] for n in (1, 2, 3)},
    **{plan: ["--devices", "2xcpu", "--set", plan] for plan in ("shard=2", "tensor=2")},
    DRAWN: ["--devices", "1xcpu"],
}
WHOLE = {f"whole, {n}": ["--devices", f"{n}xcpu"] for n in (1, 2, 3)}
KEYED = "draws in a loop, or in its model, are keyed by the batch (docs/loops.md): another stream than plain python's"
VERSIONS = ("torch", "torchvision", "numpy")
NOT_OURS = {("train.py", "int(os.environ.get('RANK', -1)) != -1")}  # nanoGPT's own DDP


@dataclass(frozen=True)
class Script:
    """A table of scripts.toml, which says what each word is."""

    source: str
    commit: str
    script: str
    folder: str = ""
    arguments: str = ""
    options: str = ""
    data: str = ""
    beside: tuple[str, ...] = ()
    saved: str = ""
    within: Mapping[str, float] = field(default_factory=dict)
    why: str = ""
    on_fake: Mapping[str, Any] = field(default_factory=dict)
    small: tuple[tuple[str, ...], ...] = ()
    ours: tuple[tuple[str, ...], ...] = ()
    shown: tuple[tuple[str, ...], ...] = ()

    def edits(self, word: str) -> list[Edit]:
        """`small`, `ours` or `shown`, each with its file."""
        return [(*(self.script,)[: 3 - len(edit)], *edit) for edit in getattr(self, word)]  # type: ignore[misc]


PLACE = ROOT / "tests" / "programs" / "foreign"
SCRIPTS = {name: Script(**each) for name, each in tomllib.loads((PLACE / "scripts.toml").read_text()).items()}


def edited(folder: Path, edits: Iterable[Edit]) -> dict[str, int]:
    """Replace each old text wherever it stands, at least once; gives the lines of code added and removed."""
    told = Counter(added=0, removed=0)
    for name, old, new in edits:
        text = (folder / name).read_text()
        if old not in text:
            sys.exit(f"{folder}/{name} has nowhere {old!r}. It is another version.")
        (folder / name).write_text(text.replace(old, new))
        lines = list(difflib.unified_diff(text.splitlines(), text.replace(old, new).splitlines(), n=0, lineterm=""))[2:]
        code = [line[0] for line in lines if line[1:].strip() and not line[1:].strip().startswith("#")]
        told.update(added=code.count("+"), removed=code.count("-"))
    return dict(told)


def put_behind_import(file: Path, *lines: str) -> None:
    """Put lines behind the first `import torch` of a file."""
    begins = "\n".join(["import torch", *lines, ""])
    text, count = re.subn(r"^import torch *\n", begins, file.read_text(), count=1, flags=re.MULTILINE)
    if not count:
        sys.exit(f"{file} imports no torch")
    file.write_text(text)


def of_whole(edits: list[Edit]) -> list[Edit]:
    """The one line alone, with `view="whole"`, and what has nothing of meshwise in it."""
    lines = [(name, old, whole_view(new)) for name, old, new in edits if "mw.distribute(" in new]
    return lines + [edit for edit in edits if edit[0:2] in NOT_OURS]


def whole_view(text: str) -> str:
    """Each call of `mw.distribute` in a text with `view="whole"`."""
    before, found, rest = text.partition("mw.distribute(")
    if not found:
        return text
    depth, end = 1, 0
    while depth:
        depth += {"(": 1, ")": -1}.get(rest[end], 0)
        end += 1
    return f'{before}{found}{rest[: end - 1]}, view="whole"{whole_view(rest[end - 1 :])}'


def prepared(script: Script, originals: Path, folder: Path, pair: str) -> dict[str, int]:
    """The script in a folder of its own, with its data; gives the lines that meshwise asked for."""
    source = originals / script.source.partition("/")[2]
    shutil.copytree(source / script.folder, folder, dirs_exist_ok=True)
    for name in script.beside:
        shutil.copytree(source / name, folder / Path(name).name)
    if script.data:
        getattr(importlib.import_module("tests.programs.foreign.data"), script.data)(folder)
    edited(folder, script.edits("small"))
    put_behind_import(folder / script.script, "torch.set_default_dtype(torch.float64)", "torch.manual_seed(0)")
    shown = script.edits("shown")
    if pair == PLAIN:
        edited(folder, [(name, old, new.replace("mw.print(", "print(")) for name, old, new in shown])
        return {}
    ours = script.edits("ours")
    ours = of_whole(ours) if pair in WHOLE else ours
    lines = edited(folder, ours)
    edited(folder, shown)
    for name in {script.script, *(edit[0] for edit in ours)}:
        put_behind_import(folder / name, "import meshwise as mw")
    return lines


def started(words: list[str], folder: Path) -> tuple[int, str]:
    """The exit code and the output; -1 where it hangs."""
    places = os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])
    settings = os.environ | {"PYTHONPATH": places, "OMP_NUM_THREADS": "1", "MPLBACKEND": "agg"}
    settings["PYTHONHASHSEED"] = "0"  # a set of words has one order in all runs of a script
    try:
        done = subprocess.run(
            words, cwd=folder, env=settings, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=LIMIT
        )
    except subprocess.TimeoutExpired as late:
        return -1, str(late.stdout)
    return done.returncode, done.stdout + done.stderr


def losses(output: str) -> list[float]:
    """What was shown of them."""
    return [float(word) for word in re.findall(r"^loss (\S+)$", output, re.MULTILINE)]


def apart(one: list[float], other: list[float]) -> float | None:
    """The largest relative difference; None where they are not as many, or there are none."""
    if len(one) != len(other) or not one:
        return None
    return max(abs(a - b) / max(abs(a), 1e-12) for a, b in zip(one, other, strict=True))


def run(script: Script, pair: str, originals: Path, folder: Path) -> dict[str, Any]:
    """A pair: its exit code, what it printed, and its losses."""
    lines = prepared(script, originals, folder, pair)
    words = [script.script, *script.arguments.split()]
    if pair == PLAIN:
        command = [sys.executable]
    else:
        given = script.options.split() if pair not in ("1", "whole, 1") else []  # one device draws as plain python does
        command = [sys.executable, "-m", "meshwise", "run", *(PAIRS | WHOLE)[pair], *given, "--out", "runs"]
    code, output = started([*command, *words], folder)
    return {"code": code, "output": output, "losses": losses(output), "lines": lines}


def weights_apart(one: Path, other: Path) -> float | None:
    """The largest relative difference of two saved state_dicts; None where one is missing."""
    if not (one.exists() and other.exists()):
        return None
    a, b = (torch.load(path, map_location="cpu") for path in (one, other))
    if b is None or a.keys() != b.keys():
        return None
    return float(max((a[k] - b[k]).abs().max() / a[k].abs().max().clamp(min=1e-12) for k in a if a[k].numel()))


def sentence(output: str) -> str:
    """The last line that says why it ended, without the lines of a summary."""
    summary = ("records ", "starting ", "more ")
    lines = [line for line in output.splitlines() if line.strip() and not line.startswith(summary)]
    return lines[-1][:400] if lines else ""


def judged(script: Script, pair: str, done: dict[str, Any], plain: dict[str, Any], at: tuple[Path, Path]) -> Any:
    """The outcome of a pair, and its figures."""
    output = done["output"]
    if pair == PLAIN:
        ran = done["code"] == 0 and done["losses"]
        return (
            {"outcome": "ran", "losses": len(done["losses"])} if ran else {"outcome": "WRONG", "said": output[-2500:]}
        )
    if done["code"] == -1:
        return {"outcome": "HANG", "said": output[-1500:]}
    if done["code"]:
        crash = "killed by SIG" in output or ("Traceback" in output and FAILED.match(sentence(output)))
        return {"outcome": "CRASH" if crash else "refused", "said": output[-2500:] if crash else sentence(output)}
    found = {"losses apart": apart(plain["losses"], done["losses"])}
    if script.saved:
        found["weights apart"] = weights_apart(at[0] / script.saved, at[1] / script.saved)
    keyed = bool(script.options) and pair in ("1", DRAWN)
    bound = script.within.get(pair.removeprefix("whole, "), BOUND)
    right = None not in found.values() and (keyed or max(found.values()) <= bound)  # type: ignore[type-var, operator]
    if not right:
        return {"outcome": "WRONG", **found, "said": output[-2500:]}
    if max(found.values()) <= BOUND:  # type: ignore[type-var, operator]
        return {"outcome": "equal", **found, "lines of code": done["lines"]}
    why = {"why": KEYED} if keyed else {"bound": bound, "why": script.why}
    return {"outcome": "other draws" if keyed else "within its bound", **found, **why}


def measured(script: Script, pair: str, originals: Path, at: Path) -> Any:
    """A pair that is not known yet."""
    if pair == DRAWN and not script.options:
        return {"outcome": "draws nothing"}
    reference = DRAWN if script.options and pair not in (PLAIN, "1", DRAWN, *WHOLE) else PLAIN
    folders, told = {side: at / side.replace("=", "-") / "here" for side in (reference, pair)}, {}
    for side, folder in folders.items():
        if not folder.exists():
            (folder.parent / "done.json").write_text(json.dumps(run(script, side, originals, folder)))
        told[side] = json.loads((folder.parent / "done.json").read_text())
    return judged(script, pair, told[pair], told[reference], (folders[reference], folders[pair]))


def short(found: dict[str, Any]) -> dict[str, Any]:
    """How many pairs came to what, and each pair in a word."""
    cells = {name: {pair: cell(each) for pair, each in one["pairs"].items()} for name, one in found.items()}
    ways = {pair for one in cells.values() for pair in one}
    counts = {
        pair: Counter(one["pairs"][pair]["outcome"] for one in found.values() if pair in one["pairs"]) for pair in ways
    }
    return {"outcomes": {pair: dict(counts[pair]) for pair in sorted(ways)}, "scripts": cells}


def cell(told: Mapping[str, Any]) -> str:
    """A pair in a word."""
    by = [told.get(word) for word in ("losses apart", "weights apart")]
    figure = max((value for value in by if value is not None), default=None)
    return told["outcome"] if figure is None else f"{told['outcome']}, {figure:.0e}"


def installed(name: str) -> str:
    """The version of a package."""
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"


def main() -> None:
    """Measure, keep after each pair, print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("originals", type=Path)
    parser.add_argument("--only", default="", help="scripts with this in their name")
    parser.add_argument("--whole", action="store_true", help="the whole view, and its pairs")
    parser.add_argument("--pairs", nargs="*", choices=[*PAIRS, *WHOLE], metavar="PAIR")
    parser.add_argument("--anew", action="store_true", help="run known pairs again")
    given = parser.parse_args()
    originals = given.originals.resolve()
    name_of, pairs = ("foreign_whole", [PLAIN, *WHOLE]) if given.whole else ("foreign", list(PAIRS))
    found: dict[str, Any] = kept(name_of)
    about = {"claim": " ".join((__doc__ or "").partition("Claim: ")[2].split())}
    about |= {"versions": {name: installed(name) for name in VERSIONS}}  # type: ignore[dict-item]
    for name, script in SCRIPTS.items():
        if given.only not in name or not (originals / script.source.partition("/")[2]).exists():
            continue
        one = found.setdefault(name, {"commit": f"{script.source} {script.commit}", "pairs": {}})
        with tempfile.TemporaryDirectory(prefix="foreign") as folder:
            for pair in given.pairs or pairs:
                if pair in one["pairs"] and not given.anew:
                    continue
                one["pairs"][pair] = told = measured(script, pair, originals, Path(folder))
                print(name, pair, told, flush=True)
                keep(name_of, about | short(found), found)


if __name__ == "__main__":
    main()
