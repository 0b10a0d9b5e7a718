"""Declare each option of a run once.

The command line, `mw.run`, run.json and resumed runs all use these declarations.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, replace
from pathlib import Path
from typing import Annotated, Any

from meshwise.spec.arguments import Plain, argument_texts
from meshwise.spec.devices import IN_WORDS
from meshwise.spec.durations import seconds_of
from meshwise.spec.errors import UsageError, check_known
from meshwise.spec.faults import parse_fault
from meshwise.spec.options import OfJobs, OfThePlan, OfThisStart, Option, given_options, options_of
from meshwise.spec.plan import AXES, Plan
from meshwise.spec.plan_file import plan_from_toml, plan_text, plan_to_toml
from meshwise.spec.plan_settings import plan_on, settings_values
from meshwise.spec.saves import KEEP, Saves, read_saves
from meshwise.training.job.job import Job
from meshwise.training.tracking.trackers import check_trackers
from meshwise.workers.hang import HANG_LIMIT
from meshwise.workers.node_options import NodeOptions

LOG_EVERY = 100
STOP, SKIP, BACK = ON_NAN = ("stop", "skip", "back")
RESTARTS = 3
PRELOAD = ("meshwise.training.script.distribute", "meshwise.training.job.loop", "torch._dynamo")
"""Modules that a fork server imports for training workers. (The first optimizer imports `torch._dynamo`.)"""
AUTO = "auto"
AUTO_OF_A_SCRIPT = "--plan auto works only for jobs, not for scripts. Save a plan with meshwise plan --save FILE."
"""The error message for `--plan auto` with a script. For a script, the plan must be a saved one."""
JOB = Option("mnist-mlp, mnist-cnn, mlp, gpt[:size], file.py:name, or a script.py and its arguments", argument=True)
ARGUMENT = OfJobs("an argument of the job's function: lr=3e-4, data=FOLDER", name="--arg", metavar="NAME=VALUE")


@dataclass(frozen=True)
class PlanText:
    """The text of a plan file.

    If it names no mesh axis, the plan is one replica per device, even if the run resumes on another number of devices.
    """

    text: str


@dataclass(frozen=True)
class RunOptions(NodeOptions):
    """The options of a run. Options that the user did not give have their defaults."""

    job: Annotated[Job | str | None, JOB] = None
    _: KW_ONLY
    devices: Annotated[str | None, Option(f"{IN_WORDS}; default: all accelerators, else one CPU worker")] = None
    epochs: Annotated[int | None, OfJobs("epochs to train")] = None
    batch_size: Annotated[int | None, OfJobs("samples of the global batch, over all devices")] = None
    args: Annotated[Mapping[str, Plain] | tuple[str, ...], ARGUMENT] = ()
    seed: Annotated[int | None, OfJobs("seed of the start values, the data order and the random draws")] = None
    log_every: Annotated[int | None, OfJobs(f"steps between log lines; default: {LOG_EVERY}")] = None
    on_nan: Annotated[
        str,
        OfJobs("a loss or gradient that is not finite: stop, skip the step, back: leave the batch out", metavar="WHAT"),
    ] = STOP
    resume: Annotated[
        str | Path | None, OfThisStart("continue the stopped run in this folder", metavar="RUN", scripts=False)
    ] = None
    plan: Annotated[
        Plan | PlanText | str | Path | None, Option("a plan file, or auto; default: replicas", metavar="FILE")
    ] = None
    settings: Annotated[tuple[str, ...], OfThePlan("a field of the plan: precision=bf16, recompute=full")] = ()
    exact_random: Annotated[bool, Option("dropout as on one device, on any number of them; slower")] = False
    save_every: Annotated[
        int | str | None,
        Option("save the state every 500 steps, or 10min; default: in the background, every minute", metavar="N|TIME"),
    ] = None
    keep: Annotated[int | None, Option(f"how many states to keep; default: {KEEP}")] = None
    time_limit: Annotated[
        str | None, OfThisStart("save and stop this long after the command began, exit code 85: 90s, 4h")
    ] = None
    restarts: Annotated[int | None, Option(f"how often to restart after a machine fault; default: {RESTARTS}")] = None
    hang_limit: Annotated[
        str | None, OfThisStart("how long a rank may make no progress before the run is ended: 10min; default: 60s")
    ] = None
    on_failure: Annotated[
        str | None, OfThisStart("a shell command for each failure, with its message in the environment")
    ] = None
    fault: Annotated[
        tuple[str, ...],
        OfThisStart("rehearse a failure: kill:rank=1, or with step=40, phase=backward", metavar="FAULT"),
    ] = ()
    log: Annotated[
        tuple[str, ...],
        Option("trackers to send numbers to: tensorboard, wandb, mlflow; all on this machine", metavar="TRACKER"),
    ] = ()
    out: Annotated[str | Path, OfThisStart("where run folders are made")] = "runs"
    folder: Annotated[
        str | Path | None,
        OfThisStart("the run's own folder: begins or continues the run in it", metavar="DIR"),
    ] = None

    @property
    def seconds_limit(self) -> float | None:
        """The time limit in seconds. None without a limit."""
        return None if self.time_limit is None else seconds_of(self.time_limit, "--time-limit")

    def seconds_left(self, began: float) -> float | None:
        """Return how many seconds of the time limit are left. None if there is no limit.

        began: when the command began, in seconds since 1970.
        """
        return None if self.seconds_limit is None else max(0.0, began + self.seconds_limit - time.time())

    @property
    def saves(self) -> Saves:
        """When to save the state, and how many saved states to keep."""
        return read_saves(self.save_every, self.keep)

    def __post_init__(self) -> None:
        super().__post_init__()
        _ = self.saves, self.seconds_limit  # raises for an invalid duration
        check_known("--on-nan", self.on_nan, ON_NAN)
        settle(self, "log_every")
        check_trackers(self.log)
        if self.devices is not None and not self.devices.strip():
            raise UsageError("--devices is empty. Use 2xcpu or all, or remove --devices.")
        if isinstance(self.plan, str | Path) and self.plan != AUTO:  # read the file now, for the run's record
            object.__setattr__(self, "plan", PlanText(plan_text(self.plan)))
        if self.restarts is not None and self.restarts < 0:
            raise UsageError(f"--restarts must be at least 0, but it is {self.restarts}.")
        self.hang_seconds()
        for text in self.fault:
            parse_fault(text)

    @property
    def gives_plan(self) -> bool:
        """Whether the user gave a plan, or set any field of a plan by an option."""
        return self.plan is not None or bool(self.settings)

    def plan_on(self, devices: int) -> Plan:
        """Return the plan for a run on this many devices.

        If the user gave a plan, this is the user's plan. Otherwise, the plan is data parallel: all devices hold
        replicas of the model. Options such as `--set` then change fields of the plan. Raises UsageError if the plan is
        `auto`, which only jobs can use.
        """
        if self.plan == AUTO:
            raise UsageError(AUTO_OF_A_SCRIPT)
        if self.plan is None:
            return plan_on(devices, self.settings)
        over = settings_values(self.settings)
        if isinstance(self.plan, PlanText):
            return plan_from_toml(self.plan.text, devices, over)
        assert isinstance(self.plan, Plan)
        return replace(self.plan, **over)

    def hang_seconds(self) -> float:
        """Return how many seconds a rank may make no progress before the run is ended."""
        return HANG_LIMIT if self.hang_limit is None else seconds_of(self.hang_limit, "--hang-limit")

    def refuse_restarts(self, where: str, *also: str) -> None:
        """Raise UsageError for `--restarts`, where something else starts a run again. also: further such options."""
        for name in ("restarts", *also):
            if getattr(self, name):
                raise UsageError(
                    f"--{name.replace('_', '-')} {where}: meshwise cannot restart a run there, which ends with exit "
                    "code 85. Remove this option, and start it again, or let the cluster do so."
                )

    def override(self, job: Job) -> Job:
        """Return a copy of `job` with the number of epochs, the batch size and the seed of these options. If the user
        did not give such an option, the copy keeps the job's value."""
        given = {name: getattr(self, name) for name in ("epochs", "batch_size", "seed")}
        return replace(job, **{name: value for name, value in given.items() if value is not None})

    def record(self) -> dict[str, Any]:
        """Return the options as plain values to record in run.json. `resumed` reads these values."""
        return {name: _plain(getattr(self, name)) for name, _, option in options_of(RunOptions) if option.recorded}

    def resumed(self, run: Mapping[str, Any]) -> RunOptions:
        """Return these options, with each missing option taken from the record of an earlier run.

        run: the record of the earlier run, as read from run.json.

        Raises UsageError if the record is of another job or of a script, or if the earlier run had other arguments
        (`args`).
        """
        earlier, job = run.get("request"), _plain(self.job)
        if earlier is None:
            raise UsageError(
                f"{run.get('job', 'this script')} is a script, and a script loads its state by itself (mw.load, "
                "loader.load_state_dict). Start it again without --resume."
            )
        if job is not None and job != earlier.get("job"):
            raise UsageError(f"the run to continue is of '{earlier.get('job')}', not of '{job}'. Leave the job out.")
        before = tuple(earlier.get("args") or ())
        if other := [text for text in self.args if text not in before]:
            had = ", ".join(before) or "no arguments"
            raise UsageError(f"--arg {other[0]}: the resumed run was started with {had}. Remove --arg.")
        given = {name: value for name, value, _ in given_options(self) if name not in ("args", "settings")}
        return replace(RunOptions(**_still_valid(earlier, self)), **given)


def settle(options: Any, *counts: str) -> None:
    """Replace two fields of `options` with their final values: `job` with the named job, and `args` with texts.

    options: a dataclass with the fields `job` and `args`.
    counts: the names of fields that must be at least 1 if they are given.

    Raises UsageError for an invalid argument, or a count below 1.
    """
    if isinstance(options.job, Job):  # name it here, by its variable in `__main__`, which workers lack
        object.__setattr__(options, "job", options.job.named())
    object.__setattr__(options, "args", argument_texts(options.args))
    for name in counts:
        value = getattr(options, name)
        if value is not None and value < 1:
            raise UsageError(f"--{name.replace('_', '-')} must be at least 1, but it is {value}.")


def _still_valid(earlier: Mapping[str, Any], given: RunOptions) -> dict[str, Any]:
    """Return the options of an earlier run that still apply if it is resumed with the options `given`."""
    known = {name for name, _, option in options_of(RunOptions) if option.recorded}
    left = {name: value for name, value in earlier.items() if name in known and value is not None}
    left |= {name: tuple(value) for name, value in left.items() if isinstance(value, list)}
    changed = {_field(setting) for setting in given.settings}
    changed |= set(AXES if changed & set(AXES) else ())  # earlier axes would take devices from the new axes
    settings = () if given.plan is not None else left.get("settings", ())
    left["settings"] = (*(setting for setting in settings if _field(setting) not in changed), *given.settings)
    return left | ({"plan": PlanText(left["plan"])} if "plan" in left else {})


def _field(setting: str) -> str:
    return setting.partition("=")[0].strip()


def _plain(value: Any) -> Any:
    """Convert an option's value to a value for JSON."""
    if isinstance(value, Plan):
        return plan_to_toml(value)
    if isinstance(value, Job | PlanText):
        return value.name if isinstance(value, Job) else value.text
    return str(value) if isinstance(value, Path) else value
