"""Open trackers by name: TensorBoard, Weights & Biases, MLflow.

By default, each tracker keeps its files on this machine. Its library is imported when the tracker is opened, on rank 0.
Nothing is sent over the network unless the user's environment says so: WANDB_MODE=online, MLFLOW_TRACKING_URI=http://...
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from meshwise.records import folder as names
from meshwise.records.claims import newest
from meshwise.records.run_list import args_of
from meshwise.training.tracking.trackers import OpenTracker
from meshwise.workers.environment import attempt


def _tensorboard(folder: Path, step: int) -> OpenTracker:
    from torch.utils.tensorboard import SummaryWriter

    # A resumed attempt writes to its own folder, because an earlier attempt may still write to the old one.
    own = [f"attempt-{attempt()}"] if attempt() > 1 and newest(folder) else []
    writer = SummaryWriter(str(folder.joinpath(names.TENSORBOARD, *own)), purge_step=step + 1)

    def track(values: Mapping[str, float], step: int) -> None:
        for name, value in values.items():
            writer.add_scalar(name, value, step)

    return OpenTracker("tensorboard", track, writer.close)


def _wandb(folder: Path, step: int) -> OpenTracker:
    os.environ.setdefault("WANDB_MODE", "offline")
    import wandb

    name, project = folder.resolve().name, os.environ.get("WANDB_PROJECT", "meshwise")
    settings = wandb.Settings(console="off", silent=True)
    run = wandb.init(
        project=project, name=name, id=name, resume="allow", dir=folder, config=_facts(folder), settings=settings
    )
    run.define_metric("*", step_metric="step")  # W&B's own step counter drops values that arrive late
    return OpenTracker("wandb", lambda values, step: run.log({**values, "step": step}), run.finish)


def _mlflow(folder: Path, step: int) -> OpenTracker:
    from mlflow import MlflowClient
    from mlflow.entities import Metric

    home, facts = folder.resolve().parent, _facts(folder)
    client = MlflowClient(os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{home / 'mlflow.db'}")
    name = str(facts.get("job", "meshwise"))
    known = client.get_experiment_by_name(name)
    experiment = known.experiment_id if known else client.create_experiment(name, (home / "mlruns").as_uri())
    key = folder.resolve().name
    earlier = client.search_runs([experiment], f"tags.`meshwise.run` = '{key}'", max_results=1)
    run = (earlier or [client.create_run(experiment, tags={"meshwise.run": key}, run_name=key)])[0].info.run_id
    for name, value in facts.items() if not earlier else ():
        client.log_param(run, name, value)

    def track(values: Mapping[str, float], step: int) -> None:
        now = int(time.time() * 1000)
        client.log_batch(run, [Metric(name, value, now, step) for name, value in values.items()])

    return OpenTracker("mlflow", track, lambda: client.set_terminated(run))


def _facts(folder: Path) -> dict[str, Any]:
    """Return the facts about the run in `folder` that are passed to a tracker: the job, its arguments, the options and
    the git commit."""
    if not (folder / names.RUN).is_file():
        return {}
    run = names.read_run(folder)
    facts = (run.get("request") or {}) | {"job": run.get("job"), "args": args_of(run), "commit": run.get("commit")}
    return {name: value for name, value in facts.items() if value not in (None, [], False, "")}


OPEN = {"tensorboard": _tensorboard, "wandb": _wandb, "mlflow": _mlflow}
"""Maps the name of a tracker, which is also the name of its package, to the function that opens it."""
