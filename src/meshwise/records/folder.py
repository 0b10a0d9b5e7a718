"""The run folder: what a run leaves, and under which names.

run.json              job, settings, versions, devices, status: running, finished, stopped or failed
plan.toml             the plan
metrics.jsonl         one line a step (epoch, step, loss) and one an evaluation
workers/rank0.log     what each worker printed
spans/rank0.jsonl     what each rank did when
checkpoint/           states of the run; latest.json names the newest and its SHA-256
weights.safetensors   final weights, for plain PyTorch
summary.json          accuracy, throughput, where the time went
tensorboard/          the metrics as TensorBoard events, where tensorboard is installed
"""

from __future__ import annotations

import json
import re
from datetime import datetime
from pathlib import Path
from typing import Any

from meshwise.records.atomic import write_text
from meshwise.spec.errors import UsageError

RUN, PLAN, METRICS, SUMMARY, WEIGHTS = "run.json", "plan.toml", "metrics.jsonl", "summary.json", "weights.safetensors"
CHECKPOINTS, SPANS, TENSORBOARD = "checkpoint", "spans", "tensorboard"


def create_run_folder(parent: Path, job: str) -> Path:
    """A new folder `parent/20261121-140502-mnist-mlp`. Raises UsageError where none can be made."""
    name = f"{datetime.now():%Y%m%d-%H%M%S}-{re.sub(r'[^A-Za-z0-9._-]+', '-', job).strip('-') or 'run'}"
    for attempt in range(1000):
        folder = parent / (name if attempt == 0 else f"{name}-{attempt + 1}")
        try:
            folder.mkdir(parents=True)
        except FileExistsError:
            if parent.is_file():
                break
            continue
        except OSError as error:
            raise UsageError(
                f"--out {parent}: no folder can be made there ({error.strerror}). Name another with --out DIR."
            ) from None
        return folder
    raise UsageError(f"--out {parent}: no folder can be made there. Name another with --out DIR.")


def write_run(folder: Path, facts: dict[str, Any]) -> None:
    """Write run.json anew with these facts."""
    write_text(folder / RUN, json.dumps(facts, indent=2) + "\n")


def update_run(folder: Path, **facts: Any) -> None:
    """Change facts of run.json."""
    write_run(folder, read_run(folder) | facts)


def read_run(folder: Path) -> dict[str, Any]:
    """The facts of a run. Raises UsageError when `folder` is not a run folder."""
    try:
        facts = json.loads((folder / RUN).read_text())
    except FileNotFoundError:
        raise UsageError(
            f"{folder}: no run folder (there is no {RUN} in it). Name a folder that `meshwise run` made."
        ) from None
    except (OSError, ValueError) as error:
        raise UsageError(f"{folder / RUN}: cannot be read ({error}). The run cannot be resumed from here.") from None
    if not isinstance(facts, dict):
        raise UsageError(f"{folder / RUN}: not the facts of a run.")
    return facts
