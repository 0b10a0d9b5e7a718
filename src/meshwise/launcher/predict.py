"""Start workers that predict, then join and summarize their results."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console
from torch import nn

from meshwise.hardware.find import describe
from meshwise.launcher.placing import check_kind, take_devices
from meshwise.launcher.start import worker_slots
from meshwise.parallel.fits import check_fits
from meshwise.reports.views.live_progress import LiveView
from meshwise.spec.errors import UsageError, WorkerFailed
from meshwise.spec.options import takes
from meshwise.spec.units import plural, rate_text, seconds_text
from meshwise.spec.world import World
from meshwise.terminal.notebook import shown_by
from meshwise.training.job.job import Job
from meshwise.training.job.options import PRELOAD
from meshwise.training.jobs.registry import find_in_file, find_job
from meshwise.training.prediction.options import PredictOptions
from meshwise.training.prediction.predict import Predictions as Predictions
from meshwise.training.prediction.predict import run_predict, whole
from meshwise.transfer.collectives import everyone, gather_objects
from meshwise.workers.join import join
from meshwise.workers.launch import launch
from meshwise.workers.place import place_in
from meshwise.workers.watched import Listeners


@takes(PredictOptions)
def predict(options: PredictOptions) -> Predictions:
    """Run a model once over every sample of a data set, in order and without gradients, on the devices of a plan.

    The job is a Job, a model, a function that builds a model, or a name as on the command line (`train.py:job`). The
    data is a map-style dataset, or a tuple or dict of equally long tensors. By default it is the job's test set. The
    result has one row per sample. By default, a row is what the model returns for the sample. A function
    `predict(model, batch)` can return other rows.

    With `out`, rows are written to a file as they are computed, and a stopped call can be repeated to continue. Without
    `out`, the rows are returned. Raises UsageError for an invalid job, data set or option, and WorkerFailed if a worker
    fails.
    """
    return predict_with(options, Console(stderr=True))


def predict_with(options: PredictOptions, console: Console) -> Predictions:
    """Predict, and show the progress and a summary on the console."""
    _check_out(options)
    place = place_in(os.environ)
    if place.size > 1:
        take_devices(options.devices, place)
        check_kind(options.devices, join().world)
        console.quiet |= join().world.rank > 0
        shares = gather_objects(_share(options), everyone())
    else:
        shares = _launched(options, console)
    if None in shares:
        raise WorkerFailed(
            "the program called sys.exit(0) on every rank before its end: not every sample was predicted."
        )
    found = whole(shares)
    console.print(summary(found), soft_wrap=True, markup=False, highlight=False)
    return found


def summary(found: Predictions) -> str:
    """Return a summary such as `10,003 samples in 12.3 s, 813 samples/s: predictions.jsonl`."""
    rate = f"{seconds_text(found.seconds)}, {rate_text(found.computed / max(found.seconds, 1e-9))} samples/s"
    where = "" if found.path is None else f": {found.path}"
    earlier = found.samples - found.computed
    told = f" ({earlier:,} of them by an earlier call)" if earlier else ""
    return f"{plural(found.samples, 'sample')} in {rate}{where}{told}"


shown_by(Predictions, lambda found, width: summary(found))


def _check_out(options: PredictOptions) -> None:
    """Raise UsageError, before any worker starts, if the output exists and must not be overwritten."""
    if options.out is not None:
        out = Path(options.out)
        if out.exists() and (not options.overwrite or not out.is_file()):
            raise UsageError(f"--out {out}: the file exists. Name another file, or replace it with --overwrite.")


def _job_of(options: PredictOptions) -> Job:
    """Return the job that the options describe."""
    given, data, args = options.job, options.data, [*options.args]
    if isinstance(data, str | Path):
        file, _, name = str(data).rpartition(":")
        if file.endswith(".py"):
            data = find_in_file(Path(file), name)
        else:
            data, args = None, [*args, f"data={data}"]
    if isinstance(given, str | Job):
        job = find_job(given, seed=options.seed, args=args)
    elif not callable(given) or data is None:
        raise UsageError("mw.predict needs a Job, or a model and a data set. Write mw.predict(model, dataset).")
    else:
        name = type(given).__name__ if isinstance(given, nn.Module) else getattr(given, "__name__", "model")
        make = (lambda: given) if isinstance(given, nn.Module) else given
        job = Job(name=name, model=make, loss=nn.Identity(), optimizer=nn.Identity(), data=data)
    changed: dict[str, Any] = {"predict": options.predict, "collate": options.collate, "test": data}
    changed = {name: value for name, value in changed.items() if value is not None}
    return replace(options.run_options.override(job), **changed)


def _launched(options: PredictOptions, console: Console) -> list[Predictions]:
    job = _job_of(options)
    slots = worker_slots(options.run_options)  # errors are reported before any worker starts
    plan = options.run_options.plan_on(len(slots))
    check_fits(plan, World(size=len(slots), device=slots[0].device))
    with LiveView(console) as view:
        view.print(f"{job.name}  {plan}  {describe(slots)}")
        listeners = Listeners(output=lambda stream, text: view.print(text.rstrip("\n")))
        return launch(_share, (options,), slots, listeners=listeners, preload=PRELOAD)


def _share(options: PredictOptions) -> Predictions:
    return run_predict(_job_of(options), options)
