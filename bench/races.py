"""Races between streams: what is found of faults that are planted one at a time, and no alarm in clean programs.

    make cuda
    .venv-cuda/bin/python bench/races.py --fake .venv-cuda/fake [--only WORD] [--again] [--checker]

Claims: of 60 faults at least 48 are told with file and line, of the 20 that were planted after the checker was written,
without having read it, at least 15; and nothing is told of 50 clean programs, in each of which the checker then finds a
fault, so that it was on. Everything runs on the fake CUDA (tests/cuda): a fault shows there as wrong numbers too, under
one of its schedules, and torch's own sanitizer is asked beside ours. --checker asks ours alone, seven times as fast.

To plant a fault: a table in a file tests/programs/races/*.toml, with a program that is right without it, prints what it
computes and goes wrong with it, and the text of the lines one of which is to be named; `hidden = true` by who has not
read the checker. Programs: `programs` beside it, each a function without arguments, whose docstring may say `ranks: 2`.
What the last result has is kept, so that the script goes on where it was stopped.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from keep import keep, kept

ROOT = Path(__file__).parents[1]
HERE = ROOT / "tests" / "programs" / "races"
SCHEDULES = (("default-late", 0), ("side-late", 0), ("random", 0), ("random", 1))
PATIENCE = 400
ENDS_BADLY = ("error", "hang")


@dataclass(frozen=True)
class Fault:
    """One line or a few of `file` are others. program: what runs it. lines: text of the lines one of which is to be
    named. hidden: planted after the checker was written, by somebody who has not read it."""

    name: str
    kind: str
    program: str
    file: str
    old: str
    new: str
    lines: tuple[str, ...]
    hidden: bool = False


@dataclass
class Ran:
    """What a program did: what it printed, what was told of it, and how it ended (`done`, `error`, `hang`)."""

    printed: str
    told: str
    end: str

    def facts(self, kind: str) -> list[dict[str, Any]]:
        """What inside.py said."""
        return [json.loads(text) for text in re.findall(rf"^@{kind} (.*)$", self.told, re.M)]


def faults() -> list[Fault]:
    """All of them."""
    found = [each for file in sorted(HERE.glob("*.toml")) for each in tomllib.loads(file.read_text())["fault"]]
    return [Fault(**{**each, "lines": tuple(each["lines"])}) for each in found]


def programs(folder: Path) -> dict[str, int]:
    """`ours.py:staged_copy` and how many ranks it has."""
    found = {}
    for file in sorted(folder.glob("*.py")):
        for node in ast.parse(file.read_text()).body:
            plain = isinstance(node, ast.FunctionDef) and not (
                node.args.args or node.args.vararg or node.args.kwarg or node.decorator_list
            )
            if isinstance(node, ast.FunctionDef) and plain and ast.get_docstring(node):
                ranks = re.search(r"ranks: (\d)", ast.get_docstring(node) or "")
                found[f"{file.name}:{node.name}"] = int(ranks[1]) if ranks else 1
    return found


class Place:
    """A copy of our sources and of the programs, to run in; with a fault in it."""

    def __init__(self, folder: Path, fake: Path, fault: Fault | None = None) -> None:
        self.folder, self._fake = folder, fake
        shutil.copytree(ROOT / "src", folder / "src", ignore=shutil.ignore_patterns("__pycache__"))
        shutil.copytree(HERE, folder / "races", ignore=shutil.ignore_patterns("__pycache__"))
        self.ranks = programs(folder / "races" / "programs")
        self.edited: Path | None = None
        if fault is not None:
            self.edited = folder / fault.file.replace("tests/programs/races/", "races/")
            text = self.edited.read_text()
            if text.count(fault.old) != 1:
                raise SystemExit(f"{fault.name}: {fault.file} has {text.count(fault.old)} times what is to be replaced")
            self.edited.write_text(text.replace(fault.old, fault.new))

    def run(self, program: str, mode: str, schedule: str = "immediate", seed: int = 0) -> Ran:
        """The program in each of its ranks; what rank 0 printed, and what all were told."""
        ranks, path = self.ranks[program], self.folder / "races" / "programs" / program
        command = [sys.executable, "-W", "ignore", str(self.folder / "races" / "inside.py"), mode, str(path)]
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        common = {name: value for name, value in os.environ.items() if not name.startswith(("FAKE_", "TORCH_"))} | {
            "LD_LIBRARY_PATH": str(self._fake),
            "PYTHONPATH": f"{self._fake / 'site'}:{self.folder / 'src'}:{os.environ.get('PYTHONPATH', '')}",
            "FAKE_CUDA_DEVICES": "2",
            "FAKE_CUDA_SCHEDULE": schedule,
            "FAKE_CUDA_SEED": str(seed),
            "OMP_NUM_THREADS": "1",
        }
        of_ranks = {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1"}
        of_ranks |= {"MASTER_PORT": str(port), "GROUP_RANK": "0", "TORCHELASTIC_RUN_ID": "none"}
        started, files = [], []
        for rank in range(ranks):
            own = {**of_ranks, "RANK": str(rank), "LOCAL_RANK": str(rank)} if ranks > 1 else {}
            files.append([(self.folder / f"{rank}.{name}").open("w+") for name in ("out", "err")])
            out, err = files[-1]
            started.append(subprocess.Popen(command, env={**common, **own}, stdout=out, stderr=err, cwd=self.folder))
        end = _end(started)
        texts = []
        for pair in files:
            for file in pair:
                file.seek(0)
                texts.append(file.read())
                file.close()
        return Ran(texts[0], "\n".join(texts[1::2]), end)

    def names(self, told: str, program: str, lines: tuple[str, ...]) -> bool:
        """Whether a text names one of these lines of the edited file, or of the program."""
        for file in {self.edited, self.folder / "races" / "programs" / program.split(":")[0]} - {None}:
            for number, line in enumerate(file.read_text().splitlines(), 1):
                if any(each in line for each in lines) and re.search(
                    rf'{re.escape(file.name)}(:{number}\b|", line {number}\b)', told
                ):
                    return True
        return False


def _end(started: list[subprocess.Popen[bytes]]) -> str:
    until, end = time.monotonic() + PATIENCE, "done"
    while any(process.poll() is None for process in started):
        if any(process.poll() for process in started):  # the others wait for it in vain
            until = min(until, time.monotonic() + 10)
        if time.monotonic() > until:
            end = "hang" if not any(process.poll() for process in started) else "error"
            for process in started:
                process.kill()
        time.sleep(0.05)
    return "error" if end == "done" and any(process.returncode for process in started) else end


def try_fault(fault: Fault, fake: Path, right: dict[str, Ran], checker_alone: bool) -> dict[str, Any]:
    """What each way to look says of it."""
    with tempfile.TemporaryDirectory() as folder:
        place = Place(Path(folder), fake, fault)
        found: dict[str, Any] = {"kind": fault.kind, "file": fault.file, "hidden": fault.hidden}
        races = place.run(fault.program, "checker", "default-late").facts("race")
        found["checker"] = [race["sentence"] for race in races]
        found["checker names the line"] = any(
            place.names(race["sentence"], fault.program, fault.lines) for race in races
        )
        if checker_alone:
            return found
        if fault.program not in right:
            with tempfile.TemporaryDirectory() as other:
                right[fault.program] = Place(Path(other), fake).run(fault.program, "plain")
        wanted = right[fault.program]
        if wanted.end != "done":
            raise SystemExit(f"{fault.program} fails without a fault:\n{wanted.told[-2000:]}")
        found["numbers"], found["error names the line"] = _by_numbers(place, fault, wanted)
        sanitized = place.run(fault.program, "sanitizer", "default-late")
        found["sanitizer"] = "CSAN detected" in sanitized.told
        found["sanitizer names the line"] = found["sanitizer"] and place.names(
            sanitized.told, fault.program, fault.lines
        )
    return found


def _by_numbers(place: Place, fault: Fault, wanted: Ran) -> tuple[str, bool]:
    """By which schedule the fault shows: `wrong numbers (side-late)`, an error, a hang, or what is left over."""
    named = False
    for schedule, seed in SCHEDULES:
        ran = place.run(fault.program, "plain", schedule, seed)
        if ran.end in ENDS_BADLY:
            last = ran.told.strip().splitlines()[-1:] or [""]
            return f"{ran.end}: {last[0][:160]}", place.names(ran.told, fault.program, fault.lines)
        if ran.printed != wanted.printed:
            return f"wrong numbers ({schedule} {seed})", named
    left, before = place.run(fault.program, "plain").facts("left"), wanted.facts("left")
    more = [name for name in left[0] if left[0][name] > 1.5 * before[0][name] + 3] if left and before else []
    return (f"more is left: {', '.join(more)}" if more else ""), named


def try_clean(program: str, fake: Path) -> dict[str, Any]:
    """Whether a program without a fault is clean under the checker, and the checker was on."""
    with tempfile.TemporaryDirectory() as folder:
        place = Place(Path(folder), fake)
        ran = place.run(program, "checker")
        planted = ran.facts("planted")
        found = {
            "ranks": place.ranks[program],
            "end": ran.end if ran.end == "done" else f"{ran.end}: {ran.told[-300:]}",
            "alarms": [race["sentence"] for race in ran.facts("race")],
            "on": len(planted) == place.ranks[program] and all(each["found"] for each in planted),
        }
    return found


def summary(result: dict[str, Any]) -> dict[str, Any]:
    """The claims."""
    every = list(result["faults"].values())
    hidden = [each for each in every if each["hidden"]]
    clean = list(result["clean"].values())
    told = "checker names the line", "error names the line"
    ours = {
        "faults": len(every),
        "by the checker, with file and line": sum(each[told[0]] for each in every),
        "hidden": len(hidden),
        "hidden, by the checker": sum(each[told[0]] for each in hidden),
        "clean programs": len(clean),
        "without alarm, with the checker on": sum(
            not each["alarms"] and each["on"] and each["end"] == "done" for each in clean
        ),
    }
    if any("numbers" not in each for each in every):
        return ours
    return ours | {
        "told with file and line": sum(any(each[name] for name in told) for each in every),
        "by wrong numbers, an error or what is left": sum(bool(each["numbers"]) for each in every),
        "by torch's sanitizer": sum(each["sanitizer"] for each in every),
        "by torch's sanitizer, with file and line": sum(each["sanitizer names the line"] for each in every),
        "hidden, told with file and line": sum(any(each[name] for name in told) for each in hidden),
    }


def short(result: dict[str, Any]) -> dict[str, Any]:
    """The claims, and what does not fulfil them."""
    silent = [name for name, each in result["faults"].items() if not each["checker names the line"]]
    alarmed = [name for name, each in result["clean"].items() if each["alarms"]]
    return {"summary": summary(result), "not told by the checker": silent, "alarmed": alarmed}


def main() -> None:
    """Try what the last result lacks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fake", type=Path, required=True, help="the fake CUDA that tests/cuda/build.py made")
    parser.add_argument("--only", default="", help="faults and programs with this in their names")
    parser.add_argument("--again", action="store_true", help="begin anew; with --only: those")
    parser.add_argument("--checker", action="store_true", help="our checker alone: no other schedules, no sanitizer")
    asked = parser.parse_args()
    fake = asked.fake.resolve()
    begin_anew = asked.again and not asked.only
    result: dict[str, Any] = {"faults": {}, "clean": {}} | ({} if begin_anew else kept("races"))
    right: dict[str, Ran] = {}
    for fault in faults():
        if asked.only in fault.name and (asked.again or fault.name not in result["faults"]):
            result["faults"][fault.name] = found = try_fault(fault, fake, right, asked.checker)
            told = [word for word in ("numbers", "checker", "sanitizer") if found.get(word)]
            print(f"{fault.name}: {', '.join(told) or 'nothing told'}", flush=True)
            keep("races", short(result), result)
    for program in programs(HERE / "programs"):
        if asked.only in program and (asked.again or program not in result["clean"]):
            result["clean"][program] = found = try_clean(program, fake)
            print(f"{program}: {found['end']}; {found['alarms'] or 'no alarm'}; on: {found['on']}", flush=True)
            keep("races", short(result), result)
    print(json.dumps(summary(result), indent=2))


if __name__ == "__main__":
    main()
