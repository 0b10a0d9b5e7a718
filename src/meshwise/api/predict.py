"""Predict: start the workers, show progress, summarise the result.

Tested in tests/cli/test_predict.py.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from torch import nn

from meshwise.job.job import Job
from meshwise.jobs.registry import find_in_file, find_job
from meshwise.launcher.placing import ask_for_kind, check_kind, refuse_devices
from meshwise.launcher.start import worker_slots
from meshwise.launcher.supervise import PRELOAD, forwarded_signals
from meshwise.machine.find import describe
from meshwise.parallel.fits import check_fits
from meshwise.prediction.options import PredictOptions
from meshwise.prediction.predict import SAID, digest_of, run_predict
from meshwise.records.folder import source_of
from meshwise.spec.errors import UsageError, WorkerFailed
from meshwise.spec.exit_codes import code_of_stop, stop_text
from meshwise.spec.options import takes
from meshwise.spec.units import plural, rate_text, seconds_text
from meshwise.spec.world import World
from meshwise.terminal.notebook import shown_by
from meshwise.timeline.views.live_progress import LiveView
from meshwise.transfer.collectives import broadcast_object
from meshwise.transfer.groups import everyone
from meshwise.workers.channel import Message
from meshwise.workers.halt import Halt
from meshwise.workers.join import join
from meshwise.workers.launch import launch
from meshwise.workers.launchers.find import place_in
from meshwise.workers.listeners import Listeners

QUIET_SECONDS = 10
"""The least seconds between two lines of progress, if the output is not a terminal."""


@dataclass(frozen=True)
class Predictions:
    """The result of `mw.predict`.

    outputs: the model's outputs for all samples, in the order of the data set. This is a tensor with one row per
        sample, or a list of rows if they cannot form a tensor. If the model returns a dict or tuple, this is a dict or
        tuple of such tensors or lists. None if the outputs were written to a file.
    samples: the number of samples in the data set.
    computed: the number of samples that this call computed. It is below `samples` if the call continued an earlier
        call.
    nan: the indices of samples whose output contains NaN. Only samples that this call computed are looked at.
    """

    samples: int
    computed: int
    outputs: Any
    path: Path | None
    nan: tuple[int, ...]
    seconds: float
    notes: tuple[str, ...]


@takes(PredictOptions)
def predict(options: PredictOptions) -> Predictions:
    """Run a model once over every sample of a data set, in order and without gradients, on the devices of a plan.

    The job is a Job, a model, a function that builds a model, or a name as on the command line (`train.py:job`). The
    data is a map-style dataset, or a tuple or dict of equally long tensors. By default it is the job's test set. The
    result has one row per sample. By default, a row is what the model returns for the sample. A function
    `predict(model, batch)` can return other rows.

    With `out`, rows are written to a file as they are computed, and a stopped call can be repeated to continue. Without
    `out`, the rows are returned. Raises UsageError for an invalid job, data set or option, WorkerFailed if a worker
    fails, and KeyboardInterrupt if the call was stopped.
    """
    found, code = predict_with(options, Console(stderr=True))
    if code:
        raise KeyboardInterrupt(f"the prediction was stopped after {found.computed:,} of {found.samples:,} samples")
    return found


def predict_with(options: PredictOptions, console: Console) -> tuple[Predictions, int]:
    """Predict, and show the progress on the console. Return the predictions and the exit code, which is 0 or the code
    of the signal that stopped the call."""
    _check_files(options)
    options = replace(options, data=_data_of(options))
    place = place_in(os.environ)
    if place.size > 1:
        refuse_devices(options.devices, place)
        ask_for_kind(options.devices, place)
        results, stopped = [_joined(options)], 0
        console.quiet |= join().world.rank > 0
    else:
        results, stopped = _launched(options, console)
    facts: dict[str, Any] | None = results[0]
    if facts is None:
        left = "the program called sys.exit(0) on every rank before its end: nothing was predicted."
        raise UsageError("the prediction was stopped before its first sample.") if stopped else WorkerFailed(left)
    path = None if options.out is None else Path(options.out)
    keys = ("samples", "computed", "outputs", "seconds", "notes")
    found = Predictions(path=path, nan=tuple(facts["nan"]), **{key: facts[key] for key in keys})
    if facts["done"] < found.samples:
        where = "" if path is None else ". Run the same command again to continue"
        number = stopped or signal.SIGINT
        console.print(
            f"stopped by {stop_text(number)} after {facts['done']:,} of {found.samples:,} samples{where}",
            soft_wrap=True,
        )
        return found, code_of_stop(number)
    console.print(summary(found), soft_wrap=True, markup=False, highlight=False)
    return found, 0


def summary(found: Predictions) -> str:
    """Return a summary such as `10,003 samples in 12.3 s, 813 samples/s: predictions.jsonl`. If outputs have NaN, it
    names their samples."""
    rate = f" in {seconds_text(found.seconds)}, {rate_text(found.computed / max(found.seconds, 1e-9))} samples/s"
    earlier = found.samples - found.computed
    where = "" if found.path is None else f": {found.path}"
    lines = [f"{plural(found.samples, 'sample')}{rate if found.computed else ''}{where}"]
    if earlier:
        lines[0] += f" ({earlier:,} of them by an earlier call)"
    if found.nan:
        some = ", ".join(map(str, found.nan[:SAID])) + (" …" if len(found.nan) > SAID else "")
        lines.append(f"not a number (NaN) in the output of {plural(len(found.nan), 'sample')}: {some}")
    return "\n".join(lines)


shown_by(Predictions, lambda found, width: summary(found))


def _check_files(options: PredictOptions) -> None:
    """Raise UsageError, before any worker starts, if the output file exists or the weights do not."""
    if options.out is not None:
        out = Path(options.out)
        if out.exists() and (not options.overwrite or not out.is_file()):
            raise UsageError(f"--out {out}: the file exists. Name another file, or replace it with --overwrite.")
        for folder in out.parents:
            if folder.exists() and not folder.is_dir():
                raise UsageError(f"--out {out}: {folder} is not a folder, but a file. Use another path.")
    if options.weights is not None:
        path = Path(options.weights)
        if not path.exists():
            raise UsageError(f"--weights {path}: no such file or folder. Name a run's folder, or a .safetensors file.")
        if path.is_file() and path.suffix not in (".safetensors", ".json"):
            raise UsageError(
                f"--weights {path}: this option reads only safetensors files. Write one with "
                "safetensors.torch.save_file, or load the file where the job builds its model."
            )


def _data_of(options: PredictOptions) -> Any:
    """Return the data that the user chose. The text `train.py:name` stands for the object `name` in that file. Any
    other value, such as the path of a folder, is returned unchanged."""
    file, _, name = str(options.data).rpartition(":")
    if isinstance(options.data, str) and file.endswith(".py"):
        return find_in_file(Path(file), name)
    return options.data


def _job_of(options: PredictOptions) -> Job:
    given, data, folder = options.job, options.data, None
    if isinstance(data, str | Path):
        data, folder = None, data
    if isinstance(given, str | Job):
        job = find_job(given, data=folder, seed=options.seed, args=options.args)
        job = options.run_options.override(job)
    else:
        job = _of_model(given, data if folder is None else folder)
        job = options.run_options.override(job)
    changed: dict[str, Any] = {"predict": options.predict, "collate": options.collate, "test": data}
    return replace(job, **{name: value for name, value in changed.items() if value is not None})


def _of_model(given: Any, data: Any) -> Job:
    if not callable(given):
        raise UsageError(
            f"mw.predict needs a Job, an nn.Module or a function that builds one, but got a {type(given).__name__}."
        )
    if data is None or isinstance(data, str | Path):
        raise UsageError("mw.predict needs a model and a data set. Write mw.predict(model, dataset).")
    name = type(given).__name__ if isinstance(given, nn.Module) else getattr(given, "__name__", "model")
    make = partial(_same, given) if isinstance(given, nn.Module) else given
    return Job(name=name, model=make, loss=_no_loss, optimizer=_no_loss, data=data)


def _same(model: nn.Module) -> nn.Module:
    return model


def _no_loss(*_: Any) -> Any:
    raise UsageError("a model passed to mw.predict has no loss, so it cannot be trained. Write a Job with loss=.")


def _origin(options: PredictOptions) -> dict[str, str]:
    """Return a record of the program that computes the predictions: {"source": ...} for the name of a job, {"model":
    digest} for a torch module, or {} for a Job. It is made here because workers cannot find it out."""
    if isinstance(options.job, str):
        return {"source": source_of(options.job)}
    if isinstance(options.job, nn.Module):
        return {"model": digest_of([value for pair in options.job.state_dict().items() for value in pair])}
    return {}


def _launched(options: PredictOptions, console: Console) -> tuple[list[Any], int]:
    _job_of(options)  # here too: what is wrong is reported before any worker starts
    slots = worker_slots(options.run_options)
    plan = options.run_options.plan_on(len(slots))
    check_fits(plan, World(size=len(slots), device=slots[0].device))
    halt = Halt()
    with LiveView(console) as view, forwarded_signals(halt, view), _progress(console, view) as received:
        view.print(f"{_job_of(options).name}  {plan}  {describe(slots)}")
        listeners = Listeners(received, lambda stream, text: view.print(text.rstrip("\n")))
        task = partial(_in_worker, options, _origin(options))
        results = launch(task, (), slots, listeners=listeners, halt=halt, preload=PRELOAD)
    return results, halt.signal if halt.wanted else 0


def _in_worker(options: PredictOptions, origin: dict[str, str]) -> dict[str, Any]:
    return run_predict(_job_of(options), options, origin)


def _joined(options: PredictOptions) -> dict[str, Any]:
    """Predict in this process, one of several that torchrun, srun, mpirun or mw.launch started. Collective."""
    check_kind(options.devices, join().world)
    first = join().world.rank == 0
    facts = run_predict(_job_of(options), options, _origin(options), _said if first else None)
    return dict(broadcast_object(facts, everyone()))


def _said(kind: str, **facts: Any) -> None:
    if kind == "note":
        print(facts["text"], file=sys.stderr, flush=True)


@contextlib.contextmanager
def _progress(console: Console, view: LiveView) -> Iterator[Callable[[int, Message], None]]:
    """Yield a function that shows the workers' messages. On a terminal, the progress is a line that is updated in
    place."""
    began, last = time.monotonic(), time.monotonic()
    samples = 1

    def text(message: Message) -> str:
        done = message["done"]
        return f"{done:,} of {samples:,} samples ({done / samples:.0%})  {seconds_text(time.monotonic() - began)}"

    def line(rank: int, message: Message) -> None:
        nonlocal last, samples
        if message["kind"] == "note":
            view.print(message["text"])
        elif message["kind"] == "begun":
            samples = message["samples"]
        elif message["kind"] == "predicted" and time.monotonic() - last > QUIET_SECONDS:
            last = time.monotonic()
            view.print(text(message))

    if not view.draws:
        yield line
        return
    with console.status("predicting") as status:

        def drawn(rank: int, message: Message) -> None:
            if message["kind"] == "predicted":
                status.update(text(message))
            else:
                line(rank, message)

        yield drawn
