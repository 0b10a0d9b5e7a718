"""The plan: how a job is laid on a machine, as a small value that prints as it is written.

Today a plan names the replicas (`data`), how many microbatches make a step (`accumulate`), and the precision. The other
mesh axes of the design (shard, tensor, sequence, pipeline, context) become fields here when their technique exists.
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass, fields
from typing import Any

from meshwise.spec.errors import PlanError, nearest

PRECISIONS = {
    "fp32": "parameters and computing in float32",
    "bf16": "parameters in float32, computing under autocast in bfloat16",
    "fp16": "parameters in float32, computing under autocast in float16, loss scaled",
    "fp64": "parameters and computing in float64",
}


@dataclass(frozen=True, repr=False)
class Plan:
    """How a job is laid on a machine.

    data: replicas of the model; each takes its share of every global batch.
    accumulate: microbatches that a global batch is cut into; gradients add up before one optimizer step.
    precision: one of `PRECISIONS`.
    bucket_mb: MiB of gradients that are reduced in one all-reduce (25 is DistributedDataParallel's default).
    """

    data: int = 1
    accumulate: int = 1
    precision: str = "fp32"
    bucket_mb: int = 25

    def __post_init__(self) -> None:
        for name in ("data", "accumulate", "bucket_mb"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise PlanError(f"{name}={value!r}: must be a whole number of at least 1. Write {name}=1.")
        if self.precision not in tuple(PRECISIONS):  # a plan file may hold what has no hash
            hint = nearest(str(self.precision), PRECISIONS)
            raise PlanError(f"precision={self.precision!r} is not known.{hint} Use one of {', '.join(PRECISIONS)}.")

    @property
    def devices(self) -> int:
        """How many devices the plan needs."""
        return self.data

    def __repr__(self) -> str:
        return f"Plan({', '.join(f'{name}={value!r}' for name, value in changed(self).items())})"


def changed(plan: Plan) -> dict[str, Any]:
    """The fields of a plan that say something: `data`, and what differs from the default."""
    return {
        f.name: getattr(plan, f.name) for f in fields(plan) if f.name == "data" or getattr(plan, f.name) != f.default
    }


def plan_to_toml(plan: Plan) -> str:
    """The plan as a TOML file, every field with its value."""
    return "".join(f"{f.name} = {_toml_value(getattr(plan, f.name))}\n" for f in fields(plan))


def plan_from_toml(text: str) -> Plan:
    """Read a plan file. Raises PlanError when the text is no TOML or names an unknown field."""
    try:
        values = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise PlanError(f"the plan file is not TOML: {error}.") from None
    known = {f.name for f in fields(Plan)}
    for name in values:
        if name not in known:
            raise PlanError(
                f"a plan has no field '{name}'.{nearest(name, known)} Known are {', '.join(sorted(known))}."
            )
    return Plan(**values)


def _toml_value(value: int | str) -> str:
    return f'"{value}"' if isinstance(value, str) else str(value)
