"""How a job is run: the plan, and what of the job's own settings the user overrides."""

from __future__ import annotations

from dataclasses import dataclass, replace

from meshwise.spec.errors import UsageError
from meshwise.spec.plan import Plan
from meshwise.training.job import Job


@dataclass(frozen=True)
class Settings:
    """How a job is run.

    epochs, batch_size, seed: override the job's own. log_every: steps between log lines. save_every: optimizer steps
    between saved states; None saves at the end and when the run is stopped. resume: go on from the newest saved state.
    exact_random: every rank draws its rows of what one device would draw (dropout).
    """

    plan: Plan
    epochs: int | None = None
    batch_size: int | None = None
    seed: int | None = None
    log_every: int = 100
    save_every: int | None = None
    resume: bool = False
    exact_random: bool = False

    def __post_init__(self) -> None:
        for name in ("log_every", "save_every"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UsageError(f"--{name.replace('_', '-')} {value}: must be at least 1.")


def overridden(job: Job, settings: Settings) -> Job:
    """`job` with what the settings override."""
    given = {name: getattr(settings, name) for name in ("epochs", "batch_size", "seed")}
    return replace(job, **{name: value for name, value in given.items() if value is not None})
