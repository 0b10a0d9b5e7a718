"""Define the run folder: what a run leaves, under which names.

run.json              job, settings, versions, devices, status (running, finished, stopped or failed), sessions
run.lock              held by the launcher as long as it runs
plan.toml             the plan
metrics.jsonl         one line per step (epoch, step, loss) and one per evaluation
workers/rank0.log     what each worker printed; rank0.2.log in attempt 2
spans/rank0.jsonl     what each rank did when: its spans, counters and clock; rank0.2.jsonl in attempt 2
checkpoint/           states of the run, a folder each (see records/checkpoints.py)
weights.safetensors   final parameters, for plain PyTorch
best.safetensors      parameters of the best epoch, if the job says which is best
summary.json          accuracy, throughput, where the time went
submit.sh, code.json  what `meshwise submit` has sent: its script (on Kubernetes submit.yaml), the program's hashes
stop                  exists once `meshwise stop` has stopped the run for good
faults.jsonl          injected faults that happened, one line each (`--fault`)
left-out.jsonl        batches that the run leaves out, one line each (`--on-nan back`)
attempts/             of a run on several machines: who began which attempt (see records/claims.py)
tensorboard/          the metrics as TensorBoard events, if tensorboard is installed
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import platform
import re
import shlex
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

from meshwise.records.checkpoints import CHECKPOINTS as CHECKPOINTS
from meshwise.records.checkpoints import checkpoints_in
from meshwise.records.claims import claim, newest, newest_record, record_path, write_of
from meshwise.records.files import Record, kept_lines, write_text
from meshwise.records.lock import is_abandoned
from meshwise.spec.errors import UsageError
from meshwise.spec.words import error_text, printable

RUN, PLAN, METRICS, SUMMARY, WEIGHTS = "run.json", "plan.toml", "metrics.jsonl", "summary.json", "weights.safetensors"
_TYPES: Mapping[str, type] = {
    **dict.fromkeys(("job", "started", "status", "ended", "error", "command", "commit"), str),
    **dict.fromkeys(("devices", "sessions", "arguments"), list),
    **dict.fromkeys(("versions", "request", "submission"), dict),
    **dict.fromkeys(("world", "machine"), int),
}
"""The fields of run.json that are checked, with the type that each must have if it is present."""
RUNNING, QUEUED = "running", "queued"
KILLED = "all its processes ended without a recorded reason: they were killed, or the machine went down"
MOST_RANKS, LATEST = 1_000_000, 4e9
"""Larger numbers in run.json, and later times in seconds since 1970, show that the file is damaged."""
SPANS, TENSORBOARD, BEST = "spans", "tensorboard", "best.safetensors"
FAULTS, LEFT_OUT = "faults.jsonl", "left-out.jsonl"
_own: dict[Path, int] = {}
"""Maps a run folder to the attempt (a number) that this process claimed. Records of later attempts are not read."""
_unwritten: dict[Path, dict[str, Any]] = {}
"""Contents of run.json that could not be written yet because the disk is full."""
STOP = "stop"
"""A file that exists once somebody has stopped a run for good, so that no later start by the scheduler continues it."""


def create_run_folder(parent: Path, job: str) -> Path:
    """Make a new folder for a run, such as `parent/20261121-140502-mnist-mlp`. Raises UsageError if this fails."""
    job = Path(job).stem if job.endswith(".py") else job
    name = f"{datetime.now():%Y%m%d-%H%M%S}-{re.sub(r'[^A-Za-z0-9._-]+', '-', job).strip('-') or 'run'}"
    try:
        parent.mkdir(parents=True, exist_ok=True)
        for number in itertools.count(1):
            folder = parent / (name if number == 1 else f"{name}-{number}")
            with contextlib.suppress(FileExistsError):
                folder.mkdir()
                break
    except OSError as error:
        raise UsageError(
            f"--out {parent}: no folder can be made in it ({error.strerror}). Name another folder with --out DIR."
        ) from None
    return folder


def own_run_folder(folder: Path) -> Path:
    """Make the folder of one run if it is missing, and return it. Raises UsageError if this fails."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"--folder {folder} cannot be created ({error.strerror}). Name another folder.") from None
    return folder


def saved_step(folder: Path) -> int | None:
    """Return the step of the newest complete checkpoint in a run folder, or None if there is none."""
    found = checkpoints_in(folder / CHECKPOINTS)
    return found[-1].step if found else None


def span_log(folder: Path, rank: int, attempt: int = 1) -> Path:
    """Return the path of the span log of a rank. Each attempt has its own log."""
    return folder / SPANS / (f"rank{rank}.jsonl" if attempt == 1 else f"rank{rank}.{attempt}.jsonl")


def write_run(folder: Path, facts: dict[str, Any]) -> None:
    """Write the facts of a run to run.json. If this fails, e.g. because the disk is full, the run continues, and the
    facts are written later. OSError is raised only if there is no run.json yet.

    If machines claim the attempts of this run (records/claims.py), the facts are also written to a file of their newest
    attempt, such as `attempts/2.run.json`. run.json stays unchanged if a machine has claimed a later attempt.
    """
    text, number = json.dumps(facts, indent=2) + "\n", len(facts.get("sessions") or ())
    try:
        if newest(folder):
            write_text(record_path(folder, number), text)
        write_of(folder, number, folder / RUN, lambda file: file.write(text.encode()))
    except OSError as error:
        if not (folder / RUN).exists():
            raise
        if folder not in _unwritten:
            print(f"{folder / RUN} cannot be written ({error.strerror}). The run continues.", file=sys.stderr)
        _unwritten[folder] = facts
    else:
        _unwritten.pop(folder, None)


def _written(folder: Path) -> dict[str, Any]:
    return _unwritten.get(folder) or read_run(folder, _own.get(folder))


def newest_run(parent: Path, *, queued: bool = False) -> Path:
    """Return the folder of the run in `parent` that began last. Raises UsageError if there is none.

    queued: for a run that was submitted but has not begun, take the time of its submission as its beginning.
    """
    runs = [path.parent for path in parent.glob(f"*/{RUN}")]
    if not runs:
        raise UsageError(f"there is no run in {parent}/. Start one with `meshwise run`, or name the folder of a run.")
    return max(runs, key=lambda folder: (since(folder, queued=queued), folder.name))


def since(folder: Path, *, queued: bool = True) -> str:
    """Return when a run began, as ISO text; "" if unknown. If `queued`, a run that has not begun
    counts from its submission."""
    try:
        facts = read_run(folder)
    except UsageError:
        return ""
    sent = facts.get("submission", {}).get("sent") if queued else None
    return str(facts.get("started", _text(sent) if isinstance(sent, int | float) else ""))


def claim_session(folder: Path, number: int) -> bool:
    """Claim attempt `number` of a run, so that no other machine can begin this attempt. Call this before run.json
    mentions the attempt. Returns False if another machine has already claimed it."""
    saved, metrics = [each.path.name for each in checkpoints_in(folder / CHECKPOINTS)], folder / METRICS
    lines = metrics.read_bytes() if metrics.is_file() else b""
    counts = {"checkpoints": saved, "metrics": len(lines)}
    if not claim(folder, number, {"time": time.time(), "host": socket.gethostname(), **counts}):
        return False
    if metrics.is_file():  # replace the file: processes that have it open must not change it any more
        write_of(folder, number, metrics, lambda file: file.write(lines))
    _own[folder] = number
    return True


def keep_metrics(folder: Path, number: int, wanted: Callable[[Record], bool] = lambda record: True) -> None:
    """Remove the lines for which `wanted` returns False from metrics.jsonl.

    number: the attempt of the run for which this process works. If a machine has begun a later attempt
        (records/claims.py), the file stays unchanged.
    """
    path = folder / METRICS
    if path.exists():
        write_of(folder, number, path, lambda file: file.write(kept_lines(path, wanted)))


def begin_session(folder: Path, began: float, attempt: Mapping[str, Any] | None = None, /, **facts: Any) -> int:
    """Record in a new or existing run.json that an attempt begins. Returns the number of the attempt, counted from 1.

    began: the time in seconds since 1970.
    attempt: further facts about the attempt.
    facts: facts about the run as a whole.
    """
    run = _written(folder) if (folder / RUN).exists() else {}
    before = run.get("sessions", [])
    if newest(folder) and _own.get(folder, 0) <= len(before):
        claim_session(folder, len(before) + 1)
    run.setdefault("started", _text(began))  # not set yet if the run is new, or was only queued
    world = facts.get("world", run.get("world"))
    attempt = {"began": began, "ended": None, "status": RUNNING, "world": world, **(attempt or {})}
    sessions = [*map(_given_up, before), attempt]
    write_run(folder, run | facts | {"status": RUNNING, "ended": None, "error": None, "sessions": sessions})
    return len(sessions)


def _given_up(session: dict[str, Any]) -> dict[str, Any]:
    """Return an attempt's facts, with the status "failed" if the attempt was cut off while it ran."""
    return session | {"status": "failed", "reason": KILLED} if session.get("status") == RUNNING else session


def change_run(folder: Path, **facts: Any) -> None:
    """Change these facts about the run as a whole in run.json."""
    write_run(folder, _written(folder) | facts)


def add_to_session(folder: Path, **facts: Any) -> None:
    """Record these facts about the newest attempt in run.json."""
    run = _written(folder)
    run["sessions"][-1] |= facts
    write_run(folder, run)


def end_session(folder: Path, status: str, error: str | None = None, **facts: Any) -> None:
    """Record in run.json that the newest attempt ended.

    status: "finished", "stopped" or "failed".
    facts: further facts about the attempt.
    """
    run, now = _written(folder), datetime.now().timestamp()
    sessions = run.get("sessions", [])
    if sessions:
        sessions[-1] |= {"ended": now, "status": status, **facts}
    write_run(folder, run | {"status": status, "ended": _text(now), "error": error, "sessions": sessions})


def versions() -> dict[str, str]:
    """Return the versions of Python, torch and the system, for a run's record."""
    return {
        "python": platform.python_version(),
        "torch": version("torch"),
        "system": f"{platform.system()} {platform.machine()}",
    }


def what_was_typed() -> dict[str, str]:
    """Return the command line of this process and the git commit of its working folder. The commit is "" if git does
    not return one."""
    git = ["git", "rev-parse", "--short", "HEAD"]
    try:
        commit = subprocess.run(git, capture_output=True, text=True, timeout=5, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        commit = ""
    path = Path(sys.argv[0])
    program = ["python", "-m", path.parent.name] if path.name == "__main__.py" else [path.name]
    return {"command": shlex.join([*program, *sys.argv[1:]]), "commit": commit}


def source_of(word: str) -> str:
    """Return a text that is the same for two runs if they run the same program.

    It is a digest of the program's file (`train.py` or `train.py:job`), or the version of meshwise for a built-in job.
    """
    file = Path(word if word.endswith(".py") else word.rpartition(":")[0])
    if file.suffix == ".py" and file.is_file():
        return hashlib.sha256(file.read_bytes()).hexdigest()[:12]
    # Read the version from the package, since a package found only through PYTHONPATH has no metadata.
    return f"meshwise {sys.modules[__name__.partition('.')[0]].__version__}"


def _text(time: float) -> str:
    """Return a time, given in seconds since 1970, as ISO text in UTC, to the second."""
    return datetime.fromtimestamp(time, UTC).isoformat(timespec="seconds")


def read_run(folder: Path, until: int | None = None) -> dict[str, Any]:
    """Read the facts of a run from its record.

    If the run is marked as running but its launcher is gone, its status is failed. Raises UsageError if `folder` is not
    a run folder or its record is damaged.

    until: the number of an attempt. Records of later attempts are ignored. By default, the newest record is read.
    """
    try:
        if (folder / RUN).exists() and not (folder / RUN).is_file():  # reading a pipe would never end
            raise ValueError("the path is not a regular file")
        path = newest_record(folder, until) or folder / RUN  # ignore what a superseded attempt has written
        facts = _cleaned(json.loads(path.read_text(encoding="utf-8")))
    except FileNotFoundError:
        raise UsageError(
            f"{folder} is not a run folder (it has no {RUN}). Name a folder that `meshwise run` made."
        ) from None
    except (OSError, ValueError, RecursionError) as error:
        why = error.strerror if isinstance(error, OSError) else error_text(error).partition(": ")[2]
        raise UsageError(f"{folder / RUN} cannot be read ({why}). Name a folder that `meshwise run` made.") from None
    if not isinstance(facts, dict):
        raise UsageError(f"{folder / RUN} does not contain the record of a run.")
    if wrong := _wrong(facts):
        raise UsageError(f"{folder / RUN} is damaged: {wrong}. Name a folder that `meshwise run` made.")
    if facts.get("status") == RUNNING and is_abandoned(folder):
        facts |= {"status": "failed", "error": KILLED, "sessions": [*map(_given_up, facts.get("sessions", []))]}
    return {name: value for name, value in facts.items() if value is not None or _TYPES.get(name) in (None, str, dict)}


def _wrong(facts: Mapping[str, Any]) -> str:
    """Describe the first fact that has a wrong type or is out of range. Returns "" if there is none."""
    for name, kind in _TYPES.items():
        value = facts.get(name)
        if value is not None and not isinstance(value, kind):
            return f"'{name}' is not of type {kind.__name__}"
        if kind is int and isinstance(value, int) and not 0 <= value <= MOST_RANKS:
            return f"'{name}' is out of range"
    for session in facts.get("sessions") or ():
        if not (isinstance(session, dict) and _is_time(session.get("began")) and _is_time(session.get("ended") or 0)):
            return "one of its 'sessions' has no valid time"
    named = all(isinstance(name, str) for name in facts.get("devices") or ())
    return "" if named else "one of its 'devices' has no name"


def _is_time(value: Any) -> bool:
    return isinstance(value, int | float) and 0 <= value <= LATEST


def _cleaned(value: Any) -> Any:
    """Return a JSON value without the characters that a terminal would interpret or could not show."""
    if isinstance(value, dict):
        return {_cleaned(key): _cleaned(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_cleaned(each) for each in value]
    return printable(value) if isinstance(value, str) else value
