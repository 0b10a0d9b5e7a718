"""Programs that nobody here wrote, with meshwise's lines, on two fake GPUs beside two CPU workers.

    python bench/foreign_on_fake.py EXAMPLES --fake FAKE --python PYTHON [--only WORD]

EXAMPLES: a folder with pytorch/examples, unpacked; foreign code is run and never kept here. FAKE: what
tests/cuda/build.py made; PYTHON: an interpreter with that CUDA wheel, torchvision and matplotlib. The lines that are
others, and why, are in `foreign_programs.py`; each is counted (added and removed, without blank lines and comments).

Claim: the losses on two fake GPUs, under a schedule that is drawn, are those of two CPU workers bit for bit, or within
a stated bound for a stated reason; every program ends with exit code 0. The fake is no evidence for speed. `vae` draws
its noise in the model's forward, for each rank's rows: two workers differ from one CPU as two seeds do. `--only` keeps
what the last result has of the others.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from foreign_programs import PROGRAMS, Edit, Program
from keep import RESULTS, keep
from ports import changed

ROOT = Path(__file__).parents[1]
VERSIONS = "import torch, torchvision; print('torch', torch.__version__, 'torchvision', torchvision.__version__)"
COMMIT = "77f55b912142e11fcfdf5b530231fb9c52f181e8"  # of pytorch/examples
SIDES = {"1 CPU": (1, "cpu"), "2 CPU workers": (2, "cpu"), "2 fake GPUs": (2, "cuda")}


def edited(folder: Path, edits: tuple[Edit, ...]) -> dict[str, int]:
    """Replace each old text, which must stand there once; gives the lines of code added and removed."""
    before = {name: (folder / name).read_text() for name, _, _ in edits}
    for name, old, new in edits:
        text = (folder / name).read_text()
        if text.count(old) != 1:
            sys.exit(f"{folder.name}/{name}: {text.count(old)} times and not once: {old!r}. It is another version.")
        (folder / name).write_text(text.replace(old, new))
    told = [changed(text.splitlines(), (folder / name).read_text().splitlines()) for name, text in before.items()]
    return {word: sum(each[word] for each in told) for word in ("added", "removed")}


def run(program: Program, folder: Path, side: str, fake: Path, python: str) -> tuple[int, str]:
    """The exit code and the output on one side."""
    devices, kind = SIDES[side]
    settings = os.environ | {
        "LD_LIBRARY_PATH": str(fake),
        "PYTHONPATH": os.pathsep.join([f"{fake}/site", f"{ROOT}/src", os.environ.get("PYTHONPATH", "")]),
        "FAKE_CUDA_DEVICES": str(devices if kind == "cuda" else 0),
        "FAKE_CUDA_SCHEDULE": "random",
        "FAKE_CUDA_SEED": "1",
        "OMP_NUM_THREADS": "1",
    }
    words = [python, "-m", "meshwise", "run", "--devices", f"{devices}x{kind}", program.script]
    words += program.arguments.split()
    done = subprocess.run(words, cwd=folder, env=settings, capture_output=True, text=True, timeout=570, check=False)
    (folder / "log").write_text(done.stdout + done.stderr)
    return done.returncode, done.stdout


def versions(python: str, fake: Path) -> str:
    """Of what the programs ran on."""
    settings = os.environ | {"LD_LIBRARY_PATH": str(fake), "FAKE_CUDA_DEVICES": "0"}
    told = subprocess.run([python, "-c", VERSIONS], env=settings, capture_output=True, text=True, check=True).stdout
    return f"{told.strip()}, pytorch/examples at {COMMIT}"


def losses(output: str) -> list[float]:
    """What was shown of them."""
    return [float(word) for word in re.findall(r"^loss (\S+)$", output, re.MULTILINE)]


def apart(one: list[float], other: list[float]) -> float | None:
    """The largest relative difference; None where they are not as many, or there are none."""
    if len(one) != len(other) or not one:
        return None
    return max(abs(a - b) / max(abs(a), 1e-12) for a, b in zip(one, other, strict=True))


def measured(name: str, examples: Path, at: Path, fake: Path, python: str) -> dict[str, Any]:
    """A program on all sides."""
    program, outputs, codes = PROGRAMS[name], {}, {}
    lines: dict[str, dict[str, int]] = {}
    weights = []
    for number, side in enumerate(SIDES):
        folder = at / f"{name.replace(', ', '-')}-{number}" / program.folder
        shutil.rmtree(folder.parent, ignore_errors=True)
        shutil.copytree(examples / program.folder, folder)
        program.data(folder)
        lines = {word: edited(folder, getattr(program, word)) for word in ("small", "ours", "shown")}
        codes[side], outputs[side] = run(program, folder, side, fake, python)
        weights += [folder / program.saved]
    single, cpu, gpu = (losses(outputs[side]) for side in SIDES)
    difference = apart(cpu, gpu)
    return {
        "lines of code changed": lines,
        "exit codes": codes,
        "losses shown": len(gpu),
        "losses equal": difference == 0.0,
        "largest relative difference of a loss": difference,
        "from one CPU to two workers": apart(single, cpu),
        **({"weights equal": same_weights(*weights[1:])} if program.saved else {}),
        **({"bound": program.within, "why": program.why} if program.within else {}),
        "holds": not any(codes.values()) and difference is not None and difference <= program.within,
    }


def same_weights(one: Path, other: Path) -> bool:
    """Whether two saved states are the same, bit for bit."""
    import torch

    if not (one.exists() and other.exists()):
        return False
    a, b = (torch.load(path, map_location="cpu") for path in (one, other))
    return a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a)


def main() -> None:
    """Measure, and write the results."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("examples", type=Path)
    parser.add_argument("--fake", type=Path, required=True)
    parser.add_argument("--python", default=sys.executable)
    parser.add_argument("--only", default="")
    parser.add_argument("--keep-in", type=Path)
    given = parser.parse_args()
    at, fake = given.keep_in or Path(tempfile.mkdtemp(prefix="foreign")), given.fake.resolve()
    result = RESULTS / "foreign_on_fake.json"
    found = json.loads(result.read_text())["programs"] if given.only else {}
    for name in PROGRAMS:
        if given.only in name:
            found[name] = measured(name, given.examples, at.resolve(), fake, given.python)
            print(name, found[name], flush=True)
    keep("foreign_on_fake", {"versions": versions(given.python, fake), "programs": found})


if __name__ == "__main__":
    main()
