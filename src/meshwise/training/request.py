"""What the user asked of a run, as plain values: kept in run.json, and completed from there when the run is resumed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from meshwise.spec.errors import UsageError
from meshwise.spec.plan import Plan, at_precision, plan_from_settings, plan_from_toml, plan_on
from meshwise.training.settings import Settings


@dataclass(frozen=True)
class RunRequest:
    """Every field None where the user said nothing. `job` is the word of a job, `data` a folder.

    plan: the text of a plan file. settings: `field=value` of a plan, with spaces between.
    """

    job: str | None = None
    devices: str | None = None
    epochs: int | None = None
    batch_size: int | None = None
    accumulate: int | None = None
    precision: str | None = None
    seed: int | None = None
    data: str | None = None
    log_every: int | None = None
    save_every: int | None = None
    plan: str | None = None
    settings: str | None = None
    exact_random: bool | None = None


def to_record(request: RunRequest) -> dict[str, Any]:
    """The request as plain values, as run.json keeps it; `completed` reads it back."""
    return asdict(request)


def completed(given: RunRequest, recorded: Mapping[str, Any]) -> RunRequest:
    """`given`, with what it leaves open taken from the record of an earlier run. Raises UsageError for another job."""
    earlier = recorded.get("request")
    if earlier is None:
        raise UsageError(
            f"this is the run of {recorded.get('job', 'a script')}, which keeps its own loop: start it again, and let "
            "it load its own state (mw.load, loader.load_state_dict)."
        )
    if given.job is not None and given.job != earlier.get("job"):
        raise UsageError(f"the run to resume is of job '{earlier.get('job')}', not '{given.job}'. Leave the job out.")
    left = _left_open(given, earlier)
    values = {f.name: getattr(given, f.name) for f in fields(RunRequest)}
    return RunRequest(**{name: left.get(name) if value is None else value for name, value in values.items()})


def _left_open(given: RunRequest, earlier: Mapping[str, Any]) -> dict[str, Any]:
    """What was asked earlier, without what `given` says anew of the plan in other words."""
    left = dict(earlier)
    if given.plan is not None:  # another plan: what was laid over the earlier one went with it
        left |= dict.fromkeys(("accumulate", "precision", "settings"))
    names = _names(given.settings)
    left |= dict.fromkeys(name for name in ("accumulate", "precision") if name in names)
    return left


def _names(settings: str | None) -> set[str]:
    return {setting.partition("=")[0] for setting in (settings or "").split()}


def check_said_once(request: RunRequest) -> None:
    """Raises UsageError for a field of the plan that has an option of its own and a setting too."""
    for name in ("accumulate", "precision"):
        value = getattr(request, name)
        if value is not None and name in _names(request.settings):
            raise UsageError(f"{name} is set by --{name} {value} and by --set {name}=. Set it once.")


def plan_of(request: RunRequest, devices: int) -> Plan:
    """The plan that the request means on this many devices: its file, else replicas; settings and options over it."""
    settings = (request.settings or "").split()
    plan = (
        plan_from_settings(settings, plan_from_toml(request.plan, devices))
        if request.plan
        else plan_on(devices, settings)
    )
    if request.accumulate is not None:
        plan = replace(plan, accumulate=request.accumulate)
    return plan if request.precision is None else at_precision(plan, request.precision)


def settings_of(request: RunRequest, plan: Plan, *, resume: bool) -> Settings:
    """How the requested run is run under `plan`; without a word about it, every 100th step is logged."""
    return Settings(
        plan,
        epochs=request.epochs,
        batch_size=request.batch_size,
        seed=request.seed,
        log_every=request.log_every if request.log_every is not None else 100,
        save_every=request.save_every,
        resume=resume,
        exact_random=bool(request.exact_random),
    )
