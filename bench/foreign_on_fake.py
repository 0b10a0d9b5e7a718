"""Programs that nobody here wrote, with meshwise's lines, on two fake GPUs beside two CPU workers.

    python bench/foreign_on_fake.py EXAMPLES --fake FAKE --python PYTHON [--only WORD]

EXAMPLES: a folder with pytorch/examples, unpacked; foreign code is run and never kept here. FAKE: what
tests/cuda/build.py made; PYTHON: an interpreter with that CUDA wheel, torchvision and matplotlib. The lines that are
others stand in tests/programs/foreign/scripts.toml.

Claim: the losses on two fake GPUs, under a schedule that is drawn, are those of two CPU workers bit for bit, or within
a stated bound for a stated reason; every program ends with exit code 0. The fake is no evidence for speed. `vae` draws
its noise in the model's forward, for each rank's rows: two workers differ from one CPU as two seeds do. `--only` keeps
what the last result has of the others.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from foreign import ROOT, SCRIPTS, Script, apart, edited, losses, put_behind_import
from keep import RESULTS, keep

VERSIONS = "import torch, torchvision; print('torch', torch.__version__, 'torchvision', torchvision.__version__)"
SIDES = {"1 CPU": (1, "cpu"), "2 CPU workers": (2, "cpu"), "2 fake GPUs": (2, "cuda")}


def run(script: Script, folder: Path, side: str, fake: Path, python: str) -> tuple[int, str]:
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
    words = [python, "-m", "meshwise", "run", "--devices", f"{devices}x{kind}", script.script]
    words += script.on_fake["arguments"].split()
    done = subprocess.run(words, cwd=folder, env=settings, capture_output=True, text=True, timeout=570, check=False)
    (folder / "log").write_text(done.stdout + done.stderr)
    return done.returncode, done.stdout


def measured(name: str, examples: Path, at: Path, fake: Path, python: str) -> dict[str, Any]:
    """A program on all sides."""
    script, outputs, codes, weights = SCRIPTS[name], {}, {}, []
    for number, side in enumerate(SIDES):
        folder = at / f"{name.replace(', ', '-').replace('/', '-')}-{number}" / script.folder
        shutil.rmtree(folder.parent, ignore_errors=True)
        shutil.copytree(examples / script.folder, folder)
        if script.data:
            getattr(importlib.import_module("tests.programs.foreign.data"), script.data)(folder)
        for word in ("small", "ours", "shown"):
            edited(folder, script.edits(word))
        for file in {script.script, *(edit[0] for edit in script.edits("ours"))}:
            put_behind_import(folder / file, "import meshwise as mw")
        codes[side], outputs[side] = run(script, folder, side, fake, python)
        weights.append(folder / (script.saved or script.on_fake.get("saved", "")))
    single, cpu, gpu = (losses(outputs[side]) for side in SIDES)
    difference, within = apart(cpu, gpu), script.on_fake.get("within", 0.0)
    return {
        "exit codes": codes,
        "losses shown": len(gpu),
        "largest relative difference of a loss": difference,
        "from one CPU to two workers": apart(single, cpu),
        **({"weights equal": same_weights(*weights[1:])} if weights[0].is_file() else {}),
        **({"bound": within, "why": script.on_fake["why"]} if within else {}),
        "holds": not any(codes.values()) and difference is not None and difference <= within,
    }


def same_weights(one: Path, other: Path) -> bool:
    """Whether two saved states are the same, bit for bit."""
    if not (one.exists() and other.exists()):
        return False
    a, b = (torch.load(path, map_location="cpu") for path in (one, other))
    return a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a)


def main() -> None:
    """Measure, and write the results."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("examples", type=Path)
    parser.add_argument("--fake", type=Path, required=True)
    parser.add_argument("--python", default=sys.executable)
    parser.add_argument("--only", default="")
    given = parser.parse_args()
    at, fake = Path(tempfile.mkdtemp(prefix="foreign")), given.fake.resolve()
    settings = os.environ | {"LD_LIBRARY_PATH": str(fake), "FAKE_CUDA_DEVICES": "0"}
    told = subprocess.run([given.python, "-c", VERSIONS], env=settings, capture_output=True, text=True, check=True)
    result = RESULTS / "foreign_on_fake.json"
    found = json.loads(result.read_text())["programs"] if given.only else {}
    programs = [name for name, script in SCRIPTS.items() if script.on_fake]
    for name in programs:
        if given.only in name:
            found[name] = measured(name, given.examples, at, fake, given.python)
            print(name, found[name], flush=True)
    commit = f"pytorch/examples at {SCRIPTS[programs[0]].commit}"
    keep("foreign_on_fake", {"versions": f"{told.stdout.strip()}, {commit}", "programs": found})


if __name__ == "__main__":
    main()
