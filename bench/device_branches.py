"""Whether every question that the code asks about the kind of a device is answered both ways while tests run.

    make cuda
    python bench/device_branches.py [--python .venv-cuda/bin/python] [--fake .venv-cuda/fake] [--only cuda|quick]

Counts questions (tests/cuda/device_questions.py), not lines: of `a and device.type == "cpu"` both answers count.
Runs what `make cuda` runs, on the fake CUDA, then the tests that start no process and the quick ones that start some.

Claim: of all questions at most ten are answered one way only, each of them named with its reason.
"""

from __future__ import annotations

import argparse
import ast
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from keep import keep

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from tests.cuda.device_questions import ANSWERS, questions  # noqa: E402

REASONS = {
    "training/job/evaluate.py: device.startswith('mps')": "no Apple GPU, and no fake one",
    "training/job/step.py: device.startswith('mps')": "no Apple GPU, and no fake one",
    "training/engine/weighing.py: like.device.type == 'mps'": "no Apple GPU, and no fake one",
}
"""What is answered one way only, and why: `file: question`."""
ROOMS = ("arrays", "cli", "checker", "hardware", "parallel", "training", "transfer", "workers")
PARTS = {
    "cuda": (
        "-m",
        "gpu or cuda",
        "tests/cuda",
        "tests/transfer",
        "tests/training/recovery",
        "tests/workers/test_join.py",
    ),
    "quick": ("-m", "not workers and not gpu and not cuda", "tests"),
    "workers": ("-m", "workers and not slow and not gpu and not cuda", *(f"tests/{room}" for room in ROOMS)),
}


def asked(source: Path) -> list[str]:
    """Every question of the package: `file: question`."""
    paths = sorted(source.rglob("*.py"))
    return [
        f"{path.relative_to(source)}: {name}" for path in paths for name, _ in questions(ast.parse(path.read_text()))
    ]


def answered(answers: Path) -> dict[str, set[str]]:
    """The answers that were written down."""
    found: dict[str, set[str]] = {}
    for line in answers.read_text().splitlines():
        question, _, answer = line.rpartition(": ")
        found.setdefault(question, set()).add(answer)
    return found


def run(python: Path, fake: Path, parts: list[str], answers: Path) -> dict[str, str]:
    """The tests, followed. Their last lines."""
    said = {}
    with tempfile.TemporaryDirectory() as site:
        shutil.copy(ROOT / "tests/cuda/device_questions.py", Path(site) / "sitecustomize.py")
        paths = f"{site}:{fake}/site:{ROOT}/src"
        loaded = {"LD_LIBRARY_PATH": str(fake), "MESHWISE_FAKE_CUDA": str(fake), "FAKE_CUDA_DEVICES": "2"}
        for part in parts:
            settings = os.environ | loaded | {"PYTHONPATH": paths, ANSWERS: str(answers)}
            if part != "cuda":
                settings["FAKE_CUDA_DEVICES"] = "0"
                del settings["MESHWISE_FAKE_CUDA"]
            command = [str(python), "-m", "pytest", "-q", "-n", "2", "-p", "no:cacheprovider", *PARTS[part]]
            done = subprocess.run(command, cwd=ROOT, env=settings, capture_output=True, text=True)
            print(done.stdout[-3000:], file=sys.stderr)
            said[part] = done.stdout.strip().splitlines()[-1]
    return said


def main() -> None:
    """Run, and tell what is answered one way only."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--python", type=Path, default=ROOT / ".venv-cuda/bin/python")
    parser.add_argument("--fake", type=Path, default=ROOT / ".venv-cuda/fake")
    parser.add_argument("--only", choices=list(PARTS), help="one part of the tests; answers of --answers count too")
    parser.add_argument("--answers", type=Path, help="a file that keeps the answers, so that parts can be run apart")
    parser.add_argument("--tell", action="store_true", help="run nothing: tell what --answers has")
    options = parser.parse_args()
    answers = (options.answers or Path(tempfile.mkstemp()[1])).resolve()
    answers.touch()
    parts = [] if options.tell else [options.only] if options.only else list(PARTS)
    said = run(options.python.absolute(), options.fake.resolve(), parts, answers)
    all_asked, found = asked(ROOT / "src/meshwise"), answered(answers)
    one_way = {name: ", ".join(found.get(name, ["never asked"])) for name in all_asked if len(found.get(name, ())) < 2}
    for name, given in one_way.items():
        print(f"{name}   {given}   ({REASONS.get(name, 'no reason is known')})")
    print(f"{len(all_asked)} questions, {len(all_asked) - len(one_way)} answered both ways")
    told = {name: f"{given}; {REASONS.get(name, 'no reason is known')}" for name, given in one_way.items()}
    keep("device_branches", {"tests": said, "questions": len(all_asked), "one way only": told})


if __name__ == "__main__":
    main()
