"""Plan files: read, with the file's name in every error."""

from __future__ import annotations

import stat
from pathlib import Path

from meshwise.spec.errors import PlanError
from meshwise.spec.plan import Plan, plan_from_toml, plan_values


def plan_text(file: str | Path) -> str:
    """The text of a plan file. Raises PlanError, with the file's name, when it cannot be read or has other fields."""
    try:
        if stat.S_ISFIFO(Path(file).stat().st_mode) and not str(file).startswith("/dev/fd/"):  # `<(…)` has a writer
            raise OSError(0, "it is a pipe, which would be waited for")
        text = Path(file).read_text(encoding="utf-8-sig")  # some editors put a mark before the text
        plan_values(text)
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is no text"
        raise PlanError(f"{file}: no plan can be read ({why}). Name a plan file, such as a run's plan.toml.") from None
    except PlanError as error:
        raise PlanError(f"{file}: {error}") from None
    return text


def read_plan(file: str | Path, devices: int) -> Plan:
    """The plan of a plan file on this many devices. Raises PlanError when it cannot be read."""
    return plan_from_toml(plan_text(file), devices)
