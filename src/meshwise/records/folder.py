"""The run folder: what a run leaves, and under which names.

run.json              job, settings, versions, devices, status (running, finished, stopped or failed), sessions
plan.toml             the plan
metrics.jsonl         one line a step (epoch, step, loss) and one an evaluation
workers/rank0.log     what each worker printed
spans/rank0.jsonl     what each rank did when: its spans, counters and clock
checkpoint/           states of the run; latest.json names the newest and its SHA-256
weights.safetensors   final weights, for plain PyTorch
best.safetensors      those of the best epoch, where the job says which that is
summary.json          accuracy, throughput, where the time went
tensorboard/          the metrics as TensorBoard events, where tensorboard is installed
"""

from __future__ import annotations

import json
import platform
import re
import shlex
import subprocess
import sys
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

from meshwise.records.files import write_text
from meshwise.spec.errors import UsageError

RUN, PLAN, METRICS, SUMMARY, WEIGHTS = "run.json", "plan.toml", "metrics.jsonl", "summary.json", "weights.safetensors"
CHECKPOINTS, SPANS, TENSORBOARD, BEST = "checkpoint", "spans", "tensorboard", "best.safetensors"


def create_run_folder(parent: Path, job: str) -> Path:
    """A new folder `parent/20261121-140502-mnist-mlp`. Raises UsageError where none can be made."""
    job = Path(job).stem if job.endswith(".py") else job
    name = f"{datetime.now():%Y%m%d-%H%M%S}-{re.sub(r'[^A-Za-z0-9._-]+', '-', job).strip('-') or 'run'}"
    for attempt in range(1000):
        folder = parent / (name if attempt == 0 else f"{name}-{attempt + 1}")
        try:
            folder.mkdir(parents=True)
        except FileExistsError:
            continue
        except OSError as error:
            raise UsageError(
                f"--out {parent}: no folder can be made there ({error.strerror}). Name another with --out DIR."
            ) from None
        return folder
    raise UsageError(f"--out {parent}: no folder can be made there. Name another with --out DIR.")


def span_log(folder: Path, rank: int) -> Path:
    """The file in which a rank says what it did when."""
    return folder / SPANS / f"rank{rank}.jsonl"


def write_run(folder: Path, facts: dict[str, Any]) -> None:
    """Write run.json anew with these facts."""
    write_text(folder / RUN, json.dumps(facts, indent=2) + "\n")


def newest_run(parent: Path) -> Path:
    """The run in `parent` that began last. Raises UsageError when there is none."""
    runs = [path.parent for path in parent.glob(f"*/{RUN}")]
    if not runs:
        raise UsageError(f"there is no run in {parent}/. Make one with `meshwise run`, or name its folder.")
    return max(runs, key=lambda folder: (str(read_run(folder).get("started", "")), folder.name))


def is_kept_by(folder: Path, machine: int) -> bool:
    """Whether this machine of a run (from 0) writes the folder's run.json: the first of those that share the folder."""
    return not (folder / RUN).exists() or read_run(folder).get("machine", 0) == machine


def begin_session(folder: Path, began: float, **facts: Any) -> None:
    """Write that workers of the run live from `began` on (seconds since 1970): run.json is made, or goes on."""
    run = read_run(folder) if (folder / RUN).exists() else {"started": _text(began)}
    sessions = [*run.get("sessions", []), {"began": began, "ended": None, "status": "running"}]
    write_run(folder, run | facts | {"status": "running", "ended": None, "error": None, "sessions": sessions})


def end_session(folder: Path, status: str, error: str | None = None) -> None:
    """Write that the run's workers are gone, and how it ended: finished, stopped or failed."""
    run, now = read_run(folder), datetime.now().timestamp()
    sessions = run.get("sessions", [])
    if sessions:
        sessions[-1] |= {"ended": now, "status": status}
    write_run(folder, run | {"status": status, "ended": _text(now), "error": error, "sessions": sessions})


def versions() -> dict[str, str]:
    """What a run runs on, for its record."""
    return {
        "python": platform.python_version(),
        "torch": version("torch"),
        "system": f"{platform.system()} {platform.machine()}",
    }


def what_was_typed() -> dict[str, str]:
    """The command line of this process, and the commit of the folder that it runs in, where git knows one."""
    git = ["git", "rev-parse", "--short", "HEAD"]
    try:
        commit = subprocess.run(git, capture_output=True, text=True, timeout=5, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        commit = ""
    return {"command": shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]]), "commit": commit}


def _text(time: float) -> str:
    """A time in UTC, to the second."""
    return datetime.fromtimestamp(time, UTC).isoformat(timespec="seconds")


def read_run(folder: Path) -> dict[str, Any]:
    """The facts of a run. Raises UsageError when `folder` is not a run folder."""
    try:
        if (folder / RUN).exists() and not (folder / RUN).is_file():  # a pipe would be read for ever
            raise ValueError("it is not a file")
        facts = json.loads((folder / RUN).read_text())
    except FileNotFoundError:
        raise UsageError(
            f"{folder}: no run folder (there is no {RUN} in it). Name a folder that `meshwise run` made."
        ) from None
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise UsageError(f"{folder / RUN}: cannot be read ({why}). Name a folder that `meshwise run` made.") from None
    if not isinstance(facts, dict):
        raise UsageError(f"{folder / RUN}: not the facts of a run.")
    return facts
