"""The data sets of a job, and their microbatches on the device. Tested in tests/training/test_source.py."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from meshwise.training.engine import Engine, Part
from meshwise.training.job import Job
from meshwise.training.order import BatchSlice
from meshwise.training.same_data import check_data
from meshwise.training.source import LoaderSettings, Reader, count_samples, read_slices, reader
from meshwise.transfer.prefetch import prefetch


@dataclass(frozen=True)
class Data:
    """A data set of the job, ready to be read."""

    samples: int
    read: Reader


def open_data(job: Job, data: Any, what: str, engine: Engine | None = None) -> Data:
    """A data set of the job: `what` it is, in errors. engine: compares that of the ranks, where it is theirs."""
    settings = LoaderSettings(job.collate, job.loader_workers, job.seed, several=True)
    samples = count_samples(data, f"the {what} of job '{job.name}'")
    if engine is not None:
        check_data(engine, data, samples)
    return Data(samples, reader(data, settings))


def read_parts(data: Data, slices: Iterable[BatchSlice], epoch: int, device: str) -> Iterator[Part]:
    """The microbatches of `slices`, on the device, with the next ones on their way."""
    pairs = read_slices(data.read, slices, epoch)
    return pairs if device == "cpu" else prefetch(pairs, device)
