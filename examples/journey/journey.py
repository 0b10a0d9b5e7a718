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
from station import DEVICES, FOLDER, MARK, report

EXAMPLES = Path(__file__).parents[1]
ARRAYS = {"film": "ray-marched spheres", "nbody": "bodies in space", "heat": "heat in a plate"}
STOPPED = "  # and Ctrl-C in the third epoch"


def commands(images, trials):
    """The commands of each station, as one types them."""
    here, run = "examples/journey", f"meshwise run --devices {DEVICES} --out {FOLDER}/runs"
    return {
        "download": [f"python {here}/download.py"],
        "clean": [f"python {here}/damage.py {images}", f"python {here}/clean.py", f"python {here}/damage.py score"],
        "design": [f"python {here}/design.py"],
        "implement": [f"python {here}/implement.py", f"meshwise check --devices {DEVICES} {here}/implement.py"],
        "train": [f"{run} {here}/train.py{STOPPED}", f"{run} {here}/train.py"],
        "watch": [f"python {here}/watch.py"],
        "evaluate": [f"{run} {here}/evaluate.py"],
        "optimise": [f"python {here}/optimise.py {trials}"],
        "arrays": [f"python examples/arrays/{name}.py --picture {FOLDER}/{name}.png" for name in ARRAYS],
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


def arrays(printed):
    """What was done, the lines with seconds and bytes, and the pictures of the examples of arrays."""
    figures, pictures = {}, []
    for name, text in ARRAYS.items():
        part = printed.split(f"{name}.py")[1].split("\n$ ")[0]
        for what, seconds, moved in re.findall(r"^(\S.*?) +([\d.]+ s) +(.* bytes) moved", part, re.MULTILINE):
            figures[f"{text}: {what}"] = f"{seconds}, {moved} moved between devices"
        content = base64.b64encode((FOLDER / f"{name}.png").read_bytes()).decode()
        pictures.append(
            f'<figure><img alt="{text}" src="data:image/png;base64,{content}"><figcaption>{text}</figcaption>'
        )
    done = (
        "The same NumPy program on one device and divided over several; without a GPU this shows what moves, not speed."
    )
    return done, figures, *pictures


if __name__ == "__main__":
    options = argparse.ArgumentParser()
    options.add_argument("--images", type=int, default=10_000, help="to train; half as many to test")
    options.add_argument("--trials", type=int, default=12, help="of the search")
    given, began = options.parse_args(), time.perf_counter()
    shutil.rmtree(FOLDER)  # station.py has seen that it is ours
    FOLDER.mkdir()
    MARK.touch()
    walked = {}
    for station, typed in commands(given.images, given.trials).items():
        begin = time.perf_counter()
        printed = "".join(f"$ {command}\n{execute(command)}\n" for command in typed)
        walked[station] = (typed, printed, time.perf_counter() - begin)
        if station == "implement":
            verdict = re.search(r"^(equal|different|doubtful)\b.*\n.*", printed, re.MULTILINE)
            report(station, figures={"meshwise check": " ".join(verdict[0].split()) if verdict else "no verdict"})
        if station == "arrays":
            report(station, *arrays(printed))
        write_page(walked, time.perf_counter() - began)
    print(f"\n{FOLDER}/journey.html  {time.perf_counter() - began:.0f} s")
