"""Build meshwise, check the files with twine, install the wheel into a clean environment and use it there.

    python bench/release.py            # make release; the files are left in dist/

In the clean environment, away from the checkout: one epoch of mnist-mlp on two CPU workers, its report, and
`meshwise check` of README's loop. Any step that fails ends the script.

Claim: what is built installs by itself, trains, and is equal to one device; the wheel stays below 4 MB.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from datetime import UTC, datetime
from pathlib import Path

ROOT = Path(__file__).parents[1]
DIST = ROOT / "dist"
MOST = 4_000_000  # bytes of the wheel


def run(*words: object, folder: Path = ROOT) -> str:
    """Run a command and return what it printed. Exits with its output where it fails."""
    command = [str(word) for word in words]
    print("$", *command, flush=True)
    settings = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(command, cwd=folder, env=settings, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{done.stdout}{done.stderr}\nexit code {done.returncode}")
    return done.stdout + done.stderr


def readme_loop() -> str:
    """The program of README's training loop, with its added lines."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    lines = text.split("<!-- LOOP -->\n```diff\n")[1].split("\n```\n<!-- end -->")[0].splitlines()
    return "".join(line[1:] + "\n" for line in lines if not line.startswith("-"))


def found(pattern: str, text: str) -> str:
    """The first group of a pattern in a command's output. Exits where the output has none."""
    match = re.search(pattern, text)
    return match[1] if match else sys.exit(f"no {pattern!r} in:\n{text}")


def main() -> None:
    """Build, check, install, use, and write bench/results/release.json."""
    shutil.rmtree(DIST, ignore_errors=True)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        python, tools = (folder / part / "bin" / "python" for part in ("clean", "tools"))
        for environment in (python, tools):
            run(sys.executable, "-m", "venv", environment.parents[1])
        run(tools, "-m", "pip", "install", "-q", "build", "twine")
        run(tools, "-m", "build", "--outdir", DIST)
        files = sorted(DIST.iterdir())
        names = [file.name for file in files]  # no path of this machine in the result
        twine = run(tools, "-m", "twine", "--no-color", "check", "--strict", *names, folder=DIST)
        sizes = {file.name: file.stat().st_size for file in files}
        wheel = next(file for file in files if file.suffix == ".whl")
        if sizes[wheel.name] > MOST:
            sys.exit(f"{wheel.name} has {sizes[wheel.name]:,} bytes, more than {MOST:,}.")
        run(python, "-m", "pip", "install", "-q", "-c", ROOT / "constraints.txt", wheel)

        (folder / "train.py").write_text(readme_loop(), encoding="utf-8")
        meshwise = python.parent / "meshwise"
        demo = run(meshwise, "run", "mnist-mlp", "--devices", "2xcpu", "--epochs", "1", folder=folder)
        report = run(meshwise, "report", "--html", folder=folder)
        check = run(meshwise, "check", "train.py", folder=folder)
        versions = "import meshwise as m, torch; print(m.__file__, m.__version__, torch.__version__)"
        where, version, torch = run(python, "-c", versions, folder=folder).split()
        if not Path(where).is_relative_to(folder):
            sys.exit(f"the clean environment took meshwise from {where}")
    accuracy = found(r"accuracy (\S+) %", demo)
    result = {
        "date": datetime.now(UTC).date().isoformat(),
        "commit": run("git", "rev-parse", "--short", "HEAD").strip(),
        "version": version,
        "python": sys.version.split()[0],
        "torch": torch,
        "bytes": sizes,
        "twine": [line for line in twine.splitlines() if "PASSED" in line or "WARNING" in line],
        "mnist-mlp, one epoch of the sample": f"accuracy {accuracy} %",
        "report": found(r"written\s+\S*?([^/\s]+\.html)", report),
        "check": found(r"((?:equal|differs|not judged)[^\n]*)", check),
    }
    (ROOT / "bench" / "results" / "release.json").write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
