"""Training scripts that nobody here wrote, in runs of their own, with the lines that the README asks for.

    python bench/foreign.py ORIGINALS [--only WORD] [--pairs 2 "tensor=2"] [--old SRC] [--anew] [--whole]

ORIGINALS: a folder with the repositories of `foreign_scripts.py` and `foreign_courses.py` at their commits, each under
its own name; foreign code is run and never kept here. Everything is float64, on CPU workers with one thread each. A
pair is a script and a way to run it: plain python without meshwise, 1, 2 and 3 devices, stopped in the middle by
Ctrl-C and resumed, and two devices under `shard=2` and `tensor=2`. Each is in the results as soon as it has ended, and
is not run again. What is not equal is run once more with the sources in SRC, those of 9d7d689 for instance. Scripts
that draw noise or masks run with `--exact-random` on several devices, and beside one device that draws so; that one is
compared with plain python whose draws are the ones that it has made (`foreign_draws.py`): pair "1, exact draws".

`--whole`: with `view="whole"` and the line of `mw.distribute` alone, on 1, 2 and 3 devices beside plain python; all
else is the original's, draws and `torch.save` too. Results go to foreign_whole.json.

Claim: every pair has plain python's losses, and weights where the script saves a state_dict, within 1e-9 (relative), or
within a stated bound for a stated reason, or is refused with a sentence; none is wrong, hangs or ends in a traceback;
none that is refused was equal before.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from foreign_courses import COURSES
from foreign_on_fake import apart, losses
from foreign_programs import IMPORT, Edit
from foreign_scripts import KEYED, SCRIPTS, Script
from keep import RESULTS, keep
from ports import changed

ROOT = Path(__file__).parents[1]
PROGRAMS = SCRIPTS | COURSES
BOUND, LIMIT = 1e-9, 400.0
HOLD = "--fault=slow 200ms:rank=0,step=6"  # from there on, so that the signal comes before the end
PLAIN, DRAWN, TAPED = "plain", "1, exact draws", "plain, the same draws"
FAILED = re.compile(r"(rank|all) .* failed: (?!UsageError)")  # as a last line: the program's own error without a remedy
PAIRS: dict[str, list[str]] = {
    PLAIN: [],
    **{str(n): ["--devices", f"{n}xcpu"] for n in (1, 2, 3)},
    "resumed": ["--devices", "2xcpu", HOLD],
    **{plan: ["--devices", "2xcpu", "--set", plan] for plan in ("shard=2", "tensor=2")},
    DRAWN: ["--devices", "1xcpu"],
}
WHOLE = {f"whole, {n}": ["--devices", f"{n}xcpu"] for n in (1, 2, 3)}
VERSIONS = ("torch", "torchvision", "numpy")
NOT_OURS = {("train.py", "int(os.environ.get('RANK', -1)) != -1")}  # nanoGPT's own DDP


def edited(folder: Path, edits: tuple[Edit, ...]) -> dict[str, int]:
    """Replace each old text wherever it stands, at least once; gives the lines of code added and removed."""
    told = {"added": 0, "removed": 0}
    for name, old, new in edits:
        text = (folder / name).read_text()
        if old not in text:
            sys.exit(f"{folder}/{name} has nowhere {old!r}. It is another version.")
        (folder / name).write_text(text.replace(old, new))
        lines = changed(text.splitlines(), (folder / name).read_text().splitlines())
        told = {word: told[word] + lines[word] for word in told}
    return told


def put_behind_import(file: Path, *lines: str) -> None:
    """Put lines behind the first `import torch` of a file."""
    begins = "\n".join(["import torch", *lines, ""])
    text, count = re.subn(r"^import torch *\n", begins, file.read_text(), count=1, flags=re.MULTILINE)
    if not count:
        sys.exit(f"{file} imports no torch")
    file.write_text(text)


def without_meshwise(edits: tuple[Edit, ...]) -> tuple[Edit, ...]:
    """What shows the losses, for plain python."""
    return tuple((name, old, new.replace("mw.print(", "print(")) for name, old, new in edits)


def of_whole(edits: tuple[Edit, ...]) -> tuple[Edit, ...]:
    """The one line alone, with `view="whole"`, and what has nothing of meshwise in it."""
    lines = tuple((name, old, whole_view(new)) for name, old, new in edits if "mw.distribute(" in new)
    return lines + tuple(edit for edit in edits if edit[0:2] in NOT_OURS)


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


def prepared(script: Script, originals: Path, folder: Path, pair: str, *more: Edit) -> dict[str, int]:
    """The script in a folder of its own, with its data; gives the lines that meshwise asked for."""
    source = originals / script.source[0].partition("/")[2]
    shutil.copytree(source / script.folder, folder, dirs_exist_ok=True)
    for name in script.beside:
        shutil.copytree(source / name, folder / Path(name).name)
    script.data(folder)
    edited(folder, script.small)
    put_behind_import(folder / script.script, "torch.set_default_dtype(torch.float64)", "torch.manual_seed(0)")
    if pair == PLAIN:
        edited(folder, without_meshwise(script.shown))
        return {}
    ours = tuple(edit for edit in script.ours if edit[1:] != IMPORT)
    ours = of_whole(ours) if pair in WHOLE else ours
    if pair == "resumed":
        ours += script.kept
    draws = Path(__file__).with_name("foreign_draws.py")
    if pair == TAPED:
        shutil.copy(draws, folder / "meshwise.py")
        shutil.copy(folder.parents[1] / DRAWN / "here" / "tape", folder)
    elif pair == DRAWN:
        shutil.copy(draws, folder)
    lines = edited(folder, (*ours, *more))
    edited(folder, script.shown)
    for name in {script.script, *(edit[0] for edit in ours)}:
        put_behind_import(folder / name, "import meshwise as mw")
    if pair == DRAWN:
        put_behind_import(folder / script.script, "import foreign_draws", "foreign_draws.begin()")
    return lines


def started(words: list[str], folder: Path, sources: Path, stop_after: int = 0) -> tuple[int, str]:
    """The exit code and the output; -1 where it hangs. stop_after: losses after which it gets a Ctrl-C."""
    places = os.pathsep.join([str(sources), os.environ.get("PYTHONPATH", "")])
    settings = os.environ | {"PYTHONPATH": places, "OMP_NUM_THREADS": "1", "MPLBACKEND": "agg"}
    settings["PYTHONHASHSEED"] = "0"  # a set of words has one order in all runs of a script
    with (folder / "log").open("w+b") as log:
        process = subprocess.Popen(words, cwd=folder, env=settings, stdout=log, stderr=log, stdin=subprocess.DEVNULL)
        until, stopped = time.monotonic() + LIMIT, not stop_after
        while process.poll() is None and time.monotonic() < until:
            if not stopped and len(losses((folder / "log").read_text())) >= stop_after:
                process.send_signal(signal.SIGINT)
                stopped = True
            time.sleep(0.02)
        code = -1 if process.poll() is None else process.returncode
        process.kill()
        process.wait()
    return code, (folder / "log").read_text()


def run(name: str, pair: str, originals: Path, folder: Path, sources: Path, *more: Edit) -> dict[str, Any]:
    """A pair: its exit codes, what it printed, and its losses. more: edits."""
    script = PROGRAMS[name]
    lines = prepared(script, originals, folder, pair, *more)
    words = [script.script, *script.arguments.split()]
    if pair in (PLAIN, TAPED):
        code, output = started([sys.executable, *words], folder, sources)
        return {"codes": [code], "output": output, "losses": losses(output), "lines": lines}
    command = [sys.executable, "-m", "meshwise", "run"]
    given = script.options.split() if pair not in ("1", "whole, 1") else []  # one device draws as plain python does
    options = [*(PAIRS | WHOLE)[pair], *given, "--out", "runs"]
    stop = script.stop_after if pair == "resumed" else 0
    options += script.keeps.split() if stop else []
    code, output = started([*command, *options, *words], folder, sources, stop)
    codes, shown = [code], losses(output)
    if pair == "resumed" and code == 130:  # the same command again, as docs/checkpoints.md says
        code, more = started([*command, *(word for word in options if word != HOLD), *words], folder, sources)
        codes, output, shown = [*codes, code], f"{output}\n{more}", losses(more)
    return {"codes": codes, "output": output, "losses": shown, "lines": lines}


def weights_apart(one: Path, other: Path) -> float | None:
    """The largest relative difference of two saved state_dicts; None where one is missing."""
    import torch

    if not (one.exists() and other.exists()):
        return None
    a, b = (torch.load(path, map_location="cpu") for path in (one, other))
    if b is None:
        return None
    apart_by = [(a[key] - b[key]).abs().max() / a[key].abs().max().clamp(min=1e-12) for key in a if a[key].numel()]
    return float(max(apart_by)) if a.keys() == b.keys() else None


def sentence(output: str) -> str:
    """The last line that says why it ended, without the lines of a summary."""
    lines = [
        line for line in output.splitlines() if line.strip() and not line.startswith(("records ", "starting ", "more "))
    ]
    return lines[-1][:400] if lines else ""


def judged(
    script: Script, pair: str, done: dict[str, Any], plain: dict[str, Any], at: tuple[Path, Path]
) -> dict[str, Any]:
    """The outcome of a pair, and its figures."""
    codes, output, shown = done["codes"], done["output"], done["losses"]
    if -1 in codes:
        return {"outcome": "HANG", "codes": codes, "said": output[-1500:]}
    if codes[-1] and ("killed by SIG" in output or ("Traceback" in output and FAILED.match(sentence(output)))):
        return {"outcome": "CRASH", "codes": codes, "said": output[-2500:]}
    if codes[-1] and not (pair == "resumed" and codes == [130]):
        return {"outcome": "refused", "codes": codes, "said": sentence(output)}
    told = (
        plain["losses"][-len(shown) :]
        if pair == "resumed" and 0 < len(shown) < len(plain["losses"])
        else plain["losses"]
    )
    found = {"losses": len(shown), "losses apart": apart(told, shown)}
    if script.saved:
        found["weights apart"] = weights_apart(at[0] / script.saved, at[1] / script.saved)
    stopped = pair != "resumed" or (codes == [130, 0] and len(shown) < len(plain["losses"]))
    largest = max((value for key, value in found.items() if "apart" in key and value is not None), default=None)
    keyed = pair == "1" and bool(script.options)
    bound = None if keyed else script.within.get(pair.removeprefix("whole, "), BOUND)
    right = stopped and largest is not None and None not in found.values() and (bound is None or largest <= bound)
    far = right and largest > BOUND
    outcome = "WRONG" if not right else "equal" if not far else "other draws" if keyed else "within its bound"
    why = {"bound": bound, "why": KEYED if keyed else script.why} if far else {}
    return {"outcome": outcome, **found, **why, **({} if right else {"codes": codes, "said": output[-2500:]})}


def installed(name: str) -> str:
    """The version of a package."""
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"


def measured(name: str, pair: str, given: argparse.Namespace, at: Path) -> dict[str, Any]:
    """A pair that is not known yet; what is refused now is tried with older sources too."""
    script, folders = PROGRAMS[name], {}
    if pair == DRAWN and not script.options:
        return {"outcome": "draws nothing"}
    reference = DRAWN if script.options and pair not in (PLAIN, "1", DRAWN, *WHOLE) else PLAIN
    reference = TAPED if pair == DRAWN else reference
    for side in (pair, reference) if pair == DRAWN else (reference, pair):  # it plays what the other has recorded
        folders[side] = at / side.replace("=", "-") / "here"
        if not folders[side].exists():
            done = run(name, side, given.originals, folders[side], ROOT / "src")
            (folders[side] / "done.json").write_text(json.dumps(done))
    plain, done = (json.loads((folders[side] / "done.json").read_text()) for side in (reference, pair))
    if pair == PLAIN:
        right = plain["codes"] == [0] and plain["losses"]
        return (
            {"outcome": "ran", "losses": len(plain["losses"])}
            if right
            else {"outcome": "WRONG", "said": plain["output"][-2500:]}
        )
    told = judged(script, pair, done, plain, (folders[reference], folders[pair]))
    told["lines of code"] = done["lines"]
    if told["outcome"] == "refused" and script.advised and pair not in WHOLE:
        better = at / f"{pair.replace('=', '-')}-advised" / "here"
        shutil.rmtree(better.parent, ignore_errors=True)
        done = run(name, pair, given.originals, better, ROOT / "src", *script.advised)
        told["as advised"] = judged(script, pair, done, plain, (folders[reference], better))
    if told["outcome"] not in ("equal", "within its bound", "other draws") and given.old is not None:
        before = at / f"{pair.replace('=', '-')}-old" / "here"
        shutil.rmtree(before.parent, ignore_errors=True)
        done = run(name, pair, given.originals, before, given.old)
        old = judged(script, pair, done, plain, (folders[reference], before))
        told["before"] = {key: old.get(key) for key in ("outcome", "losses apart", "said") if key in old}
    return told


def print_table(found: dict[str, Any], pairs: Iterable[str]) -> None:
    """A row for each script, a column for each pair."""
    print(f"{'':44}" + "".join(f"{pair:>16}" for pair in pairs))
    for name, one in found.items():
        cells = [one["pairs"].get(pair, {}) for pair in pairs]
        texts = [
            f"{max(cell['losses apart'] or 0, cell.get('weights apart') or 0):.0e}"
            if cell.get("outcome") in ("equal", "within its bound")
            else cell.get("outcome", "–")
            for cell in cells
        ]
        print(f"{name:44}" + "".join(f"{text:>16}" for text in texts))


def main() -> None:
    """Measure, keep after each pair, print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("originals", type=Path)
    parser.add_argument("--only", default="", help="scripts with this in their name")
    parser.add_argument("--whole", action="store_true", help="the whole view, and its pairs")
    parser.add_argument("--pairs", nargs="*")
    parser.add_argument("--old", type=Path, help="sources with which a refused pair is tried too")
    parser.add_argument("--anew", action="store_true", help="run known pairs again")
    given = parser.parse_args()
    given.originals = given.originals.resolve()
    name_of, pairs = ("foreign_whole", [PLAIN, *WHOLE]) if given.whole else ("foreign", list(PAIRS))
    path = RESULTS / f"{name_of}.json"
    result: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    result.pop("machine", None)
    result["claim"] = " ".join((__doc__ or "").partition("Claim: ")[2].split())
    result["versions"] = {name: installed(name) for name in VERSIONS} | {"python": sys.version.split()[0]}
    found: dict[str, Any] = result.setdefault("scripts", {})
    for name, script in PROGRAMS.items():
        if given.only not in name or not (given.originals / script.source[0].partition("/")[2]).exists():
            continue
        place = f"{script.source[0]} {script.folder}/{script.script} at {script.source[1]}"
        one = found.setdefault(name, {"source": place, "pairs": {}})
        with tempfile.TemporaryDirectory(prefix="foreign") as folder:
            for pair in given.pairs or pairs:
                if pair in one["pairs"] and not given.anew:
                    continue
                one["pairs"][pair] = told = measured(name, pair, given, Path(folder))
                print(name, pair, told, flush=True)
                keep(name_of, result)
    print_table(found, pairs)


if __name__ == "__main__":
    main()
