"""Walk the whole way: run the eight stations one after the other, and write what they tell as a page.

python examples/journey/journey.py [--images 10000] [--trials 12]      writes journey/journey.html
"""

import argparse
import base64
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

from page import write_page
from station import DEVICES, FOLDER, tell

EXAMPLES = Path(__file__).parents[1]
OURS = FOLDER / "rows"  # a folder without it is somebody else's
STOPPED = "  # and Ctrl-C in the third epoch"


def commands(images, trials):
    """The commands of each station, as one types them."""
    here, run = "examples/journey", f"meshwise run --devices {DEVICES} --out {FOLDER}/runs"
    arrays = {"film": "--width 320", "nbody": "", "heat": ""}
    return {
        "download": [f"python {here}/download.py"],
        "clean": [f"python {here}/damage.py {images}", f"python {here}/clean.py", f"python {here}/damage.py score"],
        "design": [f"python {here}/design.py"],
        "implement": [f"python {here}/implement.py", f"meshwise check --devices {DEVICES} {here}/implement.py"],
        "train": [f"{run} {here}/train.py{STOPPED}", f"{run} {here}/train.py"],
        "watch": [f"python {here}/watch.py"],
        "evaluate": [f"{run} {here}/evaluate.py"],
        "optimise": [f"python {here}/optimise.py {trials}"],
        "arrays": [
            f"python examples/arrays/{name}.py {words} --picture {FOLDER}/{name}.png" for name, words in arrays.items()
        ],
    }


def execute(command):
    """Run a command as it is typed, show what it prints, and return that."""
    print(f"\n$ {command}", flush=True)
    python = {"python": [sys.executable, "-u"], "meshwise": [sys.executable, "-um", "meshwise"]}
    first, *words = [word.replace("examples", str(EXAMPLES), 1) for word in shlex.split(command, comments=True)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    with subprocess.Popen([*python[first], *words], **pipes) as process:
        lines = []
        for line in process.stdout:
            print(line, end="", flush=True)
            lines.append(line)
            if STOPPED in command and line.startswith("epoch 2/"):
                process.send_signal(signal.SIGINT)
    if process.returncode and not (STOPPED in command and process.returncode == 130):
        raise SystemExit(f"The journey ends here: {command} ended with exit code {process.returncode}.")
    return "".join(lines)


def image(path):
    return f'<img alt="{path.stem}" src="data:image/png;base64,{base64.b64encode(path.read_bytes()).decode()}">'


if __name__ == "__main__":
    options = argparse.ArgumentParser()
    options.add_argument("--images", type=int, default=10_000, help="to train; half as many to test")
    options.add_argument("--trials", type=int, default=12, help="of the search")
    given, began = options.parse_args(), time.perf_counter()
    if FOLDER.exists() and not OURS.exists():
        raise SystemExit(f"{FOLDER} exists, and no journey has made it. Move it, or begin in another folder.")
    shutil.rmtree(FOLDER, ignore_errors=True)
    walked = {}
    for station, typed in commands(given.images, given.trials).items():
        begin = time.perf_counter()
        printed = "".join(f"$ {command}\n{execute(command)}\n" for command in typed)
        walked[station] = (typed, printed, time.perf_counter() - begin)
        if station == "implement":
            verdict = re.search(r"^(equal|different|doubtful)\b.*", printed, re.MULTILINE)
            tell(station, figures={"meshwise check": verdict[0] if verdict else "no verdict"})
        if station == "arrays":
            measured = re.findall(r"^(\S.*?) +([\d.]+ s) +(.* bytes) moved", printed, re.MULTILINE)
            pictures = [image(FOLDER / f"{name}.png") for name in ("film", "nbody", "heat")]
            figures = {what: f"{seconds}, {moved} between devices" for what, seconds, moved in measured}
            tell(station, "NumPy on many devices: a film effect, bodies in space, heat in a plate.", figures, *pictures)
        write_page(walked, time.perf_counter() - began)
    print(f"\n{FOLDER}/journey.html  {time.perf_counter() - began:.0f} s")
