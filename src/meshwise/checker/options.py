"""Declare the options of a check, each once.

The command line and `mw.check` are made from these options. This file imports no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Annotated

from meshwise.spec.arguments import Plain
from meshwise.spec.devices import IN_WORDS
from meshwise.spec.errors import UsageError
from meshwise.spec.options import OfJobs, OfThePlan, Option
from meshwise.spec.plan import Plan
from meshwise.training.job.job import Job
from meshwise.training.job.options import ARGUMENT, JOB, PRELOAD, settle

DEFAULT_DEVICES = "2xcpu"
PRELOAD_OF_CHECK = (*PRELOAD, "meshwise.checker.check")
"""Modules that the fork server imports once, so that the worker processes of a check start without importing them."""


@dataclass(frozen=True)
class CheckOptions:
    """The options of a check."""

    job: Annotated[Job | str, JOB]
    _: KW_ONLY
    plan: Annotated[
        Plan | str | Path | None,
        Option("a plan file; default: that of a script, else replicas on all devices", metavar="FILE"),
    ] = None
    settings: Annotated[tuple[str, ...], OfThePlan("a field of the plan, such as shard=4")] = ()
    devices: Annotated[
        str | None, Option(f"{IN_WORDS}; default: a CPU worker for each device of the plan, else 2xcpu")
    ] = None
    steps: Annotated[int, Option("optimizer steps of the first epoch; the second has two")] = 3
    batch_size: Annotated[int | None, OfJobs("samples of the global batch, over all devices")] = None
    args: Annotated[Mapping[str, Plain] | tuple[str, ...], ARGUMENT] = ()
    seed: Annotated[int | None, Option("seed of the start values, the data order and the draws")] = None
    perturb: Annotated[
        bool,
        Option("show races: delay ranks at random, fill async buffers with NaN until wait(), follow CUDA streams"),
    ] = False
    rounding: Annotated[bool, Option("run both sides in the plan's own precision too")] = True
    arguments: Sequence[str] = ()
    notify: Callable[[str], None] = lambda text: None
    progress: Callable[[str], None] = lambda text: None

    def __post_init__(self) -> None:
        settle(self, "steps")
        if self.devices is not None and not self.devices.strip():
            raise UsageError("--devices is empty. Use 2xcpu, or leave --devices out.")
