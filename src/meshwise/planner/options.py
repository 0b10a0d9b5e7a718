"""Declare the options of a plan search, each once.

The command line and `mw.plan` are made from these options. This file imports no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Annotated, Any

from meshwise.hardware.quantity import read_quantity
from meshwise.spec.arguments import Plain
from meshwise.spec.errors import UsageError, check_known
from meshwise.spec.machine import Machine
from meshwise.spec.options import OfJobs, OfThePlan, Option
from meshwise.spec.plan import Plan
from meshwise.training.job.job import Job
from meshwise.training.job.options import ARGUMENT, JOB, settle

SECONDS = 45.0
ALLOW = {"precision": "a narrower dtype", "microbatch": "another microbatch under batch norms"}
"""The values of `--allow`, with a description. Each allows plans that may change the numbers that a job computes."""


@dataclass(frozen=True)
class PlanOptions:
    """The options of a search for plans.

    arguments: the arguments of a script.
    show: called repeatedly with the plans found so far.
    """

    job: Annotated[Job | str, JOB]
    _: KW_ONLY
    machine: Annotated[
        Machine | str | Path | None, Option("8xH100, 2x8xA100-80GB@200Gb, 4xcpu, a machine file; default: this machine")
    ] = None
    devices: Annotated[str | None, Option("how many of its devices: 8, or 1..16; default: 1 and all")] = None
    fits: Annotated[
        Plan | str | Path | None,
        Option("judge only this plan: exit code 0 if it fits, 1 if not", metavar="FILE"),
    ] = None
    within: Annotated[str | None, Option("memory that a step may take of a device: 24GiB")] = None
    explain: Annotated[bool, Option("explain the step of the first plan", name="--explain")] = False
    memory: Annotated[
        bool, Option("break down the memory of one plan: on one device, of --set or of --fits", name="--memory")
    ] = False
    steps: Annotated[int | None, Option("optimizer steps of the training; default: those of the job's epochs")] = None
    batch_size: Annotated[int | None, OfJobs("samples of the global batch, over all devices")] = None
    settings: Annotated[tuple[str, ...], OfThePlan("a field that every plan has: precision=bf16")] = ()
    allow: Annotated[tuple[str, ...], Option("changes of the numbers to allow: precision, microbatch")] = ()
    seconds: Annotated[float, Option("CPU-seconds budget for the search")] = SECONDS
    args: Annotated[Mapping[str, Plain] | tuple[str, ...], ARGUMENT] = ()
    seed: Annotated[int | None, OfJobs("seed of the start values, the data order and the draws")] = None
    arguments: Sequence[str] = ()
    show: Callable[[Any], None] = lambda found: None

    def __post_init__(self) -> None:
        settle(self, "batch_size", "steps")
        for name in self.allow:
            check_known("--allow", name, ALLOW)
        if not self.seconds > 0:
            raise UsageError(f"--seconds must be above 0, but it is {self.seconds}.")

    @property
    def cap(self) -> int | None:
        """The most memory of a device that a step may use, in bytes. None if `within` is not given."""
        return None if self.within is None else int(read_quantity(self.within, "bytes", "--within"))

    def counts(self, all_of_them: int) -> list[int]:
        """Return the device counts to search plans for. Raises UsageError if a count exceeds `all_of_them`, the number
        of devices of the machine."""
        if self.devices is None:
            return sorted({1, all_of_them})
        first, dots, last = self.devices.partition("..")
        try:
            low, high = int(first), int(last) if dots else int(first)
        except ValueError:
            low = high = 0
        if not 1 <= low <= high <= all_of_them:
            raise UsageError(
                f"--devices must be a count such as {all_of_them} or a range such as 1..{all_of_them}, with at most "
                f"{all_of_them} devices, but it is {self.devices}."
            )
        return list(range(low, high + 1))
