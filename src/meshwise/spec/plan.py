"""The plan: how a job is laid on a machine, as a small value that prints as it is written.

A plan names the mesh axes (`data` replicas, each divided over `shard` devices), what a step is cut into, and the
techniques that trade time for memory. The other axes of the design (tensor, sequence, pipeline, context) get their line
in `AXES` and a field when their technique exists.
"""

from __future__ import annotations

import math
import tomllib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from meshwise.spec.dtypes import PRECISIONS as PRECISIONS
from meshwise.spec.dtypes import Dtypes, dtypes_of
from meshwise.spec.errors import PlanError, nearest

AXES = ("data", "shard")
"""The mesh axes, outermost first: the last one lies on neighbouring devices, whose links are the fastest."""
RECOMPUTES = {
    "none": "what the backward needs is kept",
    "full": "each block keeps its input alone and runs again in the backward",
    "selective": "each block keeps its input and what is dear (matrix products, attention); the rest runs again",
}
OFFLOADS = {
    "optimizer": "the optimizer's state lies in the host's memory",
    "parameters": "this rank's part of the parameters lies in the host's memory",
    "activations": "what the backward needs waits in the host's memory",
}


@dataclass(frozen=True, repr=False)
class Plan:
    """How a job is laid on a machine.

    data: replicas of the model; each takes its share of every global batch.
    shard: devices over which each replica's parameters, gradients and optimizer state are divided; each takes its share
        of the replica's batch.
    accumulate: microbatches that a global batch is cut into; gradients add up before one optimizer step.
    precision: one of `PRECISIONS`, a word for the three dtypes below.
    param_dtype: what parameters are stored in: they are the master weights. By default float32.
    compute_dtype: what matrix products are computed in, and what a shard gathers of their weights.
    grad_dtype: what gradients are added over ranks in. By default `param_dtype`.
    zero1: parameters stay replicated, the optimizer's state is divided over the replicas.
    recompute: one of `RECOMPUTES`, or the names of the blocks that run again in the backward.
    offload: what lies in the host's memory, of `OFFLOADS`.
    reshard: whether a block's gathered parameters are let go after its forward and gathered again for its backward.
    compile: whether each block is compiled.
    bucket_mb: MiB of gradients that are reduced in one all-reduce (25 is DistributedDataParallel's default).
    """

    data: int = 1
    shard: int = 1
    accumulate: int = 1
    precision: str = "fp32"
    zero1: bool = False
    recompute: str | tuple[str, ...] = "none"
    offload: tuple[str, ...] = ()
    reshard: bool = True
    compile: bool = False
    bucket_mb: int = 25
    param_dtype: str | None = None
    compute_dtype: str | None = None
    grad_dtype: str | None = None

    def __post_init__(self) -> None:
        for name in (*AXES, "accumulate", "bucket_mb"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise PlanError(f"{name}={value!r}: must be a whole number of at least 1. Write {name}=1.")
        for name in ("zero1", "reshard", "compile"):
            if not isinstance(getattr(self, name), bool):
                raise PlanError(f"{name}={getattr(self, name)!r}: must be True or False (true or false in a file).")
        if self.precision not in tuple(PRECISIONS):  # a plan file may hold what has no hash
            hint = nearest(str(self.precision), PRECISIONS)
            raise PlanError(f"precision={self.precision!r} is not known.{hint} Use one of {', '.join(PRECISIONS)}.")
        dtypes_of(self.precision, self.param_dtype, self.compute_dtype, self.grad_dtype)
        object.__setattr__(self, "recompute", _recompute(self.recompute))
        object.__setattr__(self, "offload", _offload(self.offload))
        self._check_together()

    def _check_together(self) -> None:
        if self.zero1 and self.shard > 1:
            raise PlanError(
                f"zero1=True with shard={self.shard}: shard divides the optimizer's state already. Leave zero1 out."
            )
        if self.zero1 and self.data == 1:
            raise PlanError(
                "zero1=True divides the optimizer's state over replicas, and data=1 is one. "
                "Use data=2 or more, or leave zero1 out."
            )
        if self.compile and self.recompute == "selective":
            raise PlanError(
                "compile=True with recompute='selective': compiled code has no operators to select from. "
                "Use recompute='full', or the names of blocks, or leave compile out."
            )
        if "parameters" in self.offload and self.shard == 1:
            raise PlanError(
                "offload='parameters' keeps each rank's part of the parameters in the host's memory, and shard=1 makes "
                "no parts. Use shard=2 or more, or offload='optimizer'."
            )
        if not self.reshard and self.shard == 1:
            raise PlanError("reshard=False says when sharded parameters are let go, and shard=1 shards none. Leave it.")

    @property
    def devices(self) -> int:
        """How many devices the plan needs."""
        return math.prod(getattr(self, axis) for axis in AXES)

    @property
    def parameters_divided(self) -> bool:
        """Whether a rank holds a part of each parameter, of its gradient and of its state."""
        return self.shard > 1

    @property
    def state_divided(self) -> bool:
        """Whether a rank holds a part of the optimizer's state."""
        return self.parameters_divided or self.zero1

    @property
    def dtypes(self) -> Dtypes:
        """What the plan stores, computes and reduces in."""
        return dtypes_of(self.precision, self.param_dtype, self.compute_dtype, self.grad_dtype)

    def __repr__(self) -> str:
        return f"Plan({', '.join(f'{name}={value!r}' for name, value in changed(self).items())})"


def changed(plan: Plan) -> dict[str, Any]:
    """The fields of a plan that say something: what differs from the default, and `data` where no axis does."""
    one = plan.devices == 1
    return {
        f.name: getattr(plan, f.name)
        for f in fields(plan)
        if getattr(plan, f.name) != f.default or (one and f.name == "data")
    }


def check_devices(plan: Plan, devices: int) -> None:
    """Raises PlanError, with the nearest plan that fits, when the plan needs another number than `devices`."""
    if plan.devices == devices:
        return
    use = ", ".join(f"{axis}={value}" for axis, value in _nearest_axes(plan, devices).items())
    needs = f"{plan.devices} device{'s' * (plan.devices > 1)}"
    raise PlanError(
        f"{_axes_text(plan)} needs {needs}; this run has {devices}. "
        f"Use {use}, or start {plan.devices} worker{'s' * (plan.devices > 1)} with --devices."
    )


def _axes_text(plan: Plan) -> str:
    said = [axis for axis in AXES if getattr(plan, axis) > 1] or ["data"]
    return " x ".join(f"{axis}={getattr(plan, axis)}" for axis in said)


def _nearest_axes(plan: Plan, devices: int) -> dict[str, int]:
    """The axes to change, and their values, so that the plan fills `devices`: the sizes nearest in ratio."""
    choices = [{"data": devices // shard, "shard": shard} for shard in range(1, devices + 1) if devices % shard == 0]
    possible = [c for c in choices if _makes_a_plan(plan, c)] or choices

    def distance(choice: dict[str, int]) -> tuple[int, float, int]:
        apart = sum(abs(math.log(size / getattr(plan, axis))) for axis, size in choice.items())
        new = sum(size > 1 and getattr(plan, axis) == 1 for axis, size in choice.items())
        return new, round(apart, 9), -choice["shard"]  # of two as near, the one that holds the larger model

    best = min(possible, key=distance)
    return {axis: size for axis, size in best.items() if size != getattr(plan, axis)}


def _makes_a_plan(plan: Plan, choice: dict[str, int]) -> bool:
    try:
        replace(plan, **choice)  # type: ignore[arg-type]
    except PlanError:
        return False
    return True


def at_precision(plan: Plan, precision: str) -> Plan:
    """The plan in another precision, with that one's dtypes; the plan itself where it has that precision."""
    if precision == plan.precision:
        return plan
    return replace(plan, precision=precision, param_dtype=None, compute_dtype=None, grad_dtype=None)


def plan_to_toml(plan: Plan) -> str:
    """The plan as a TOML file, every field with its value. What follows from `precision` stands in a comment."""
    said = {
        "param_dtype": plan.dtypes.stored,
        "compute_dtype": plan.dtypes.computed,
        "grad_dtype": plan.dtypes.reduced,
    }
    lines = []
    for f in fields(plan):
        value = getattr(plan, f.name)
        line = f"{f.name} = {_toml_value(said[f.name] if value is None else value)}\n"
        lines.append(f"# {line}" if value is None else line)
    return "".join(lines)


def plan_from_toml(text: str, devices: int = 1) -> Plan:
    """Read a plan file; of one that names no axis, replicas fill `devices`.

    Raises PlanError when the text is no TOML or names an unknown field.
    """
    values = plan_values(text)
    if not any(axis in values for axis in AXES):
        values["data"] = devices
    return Plan(**values)


def plan_values(text: str) -> dict[str, Any]:
    """The fields that a plan file names. Raises PlanError when the text is no TOML or names an unknown one."""
    try:
        values = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise PlanError(f"the plan file is not TOML: {error}.") from None
    for name in values:
        _check_name(name)
    return values


def plan_from_settings(settings: Iterable[str], start: Plan | None = None) -> Plan:
    """`start` (the default plan without one) with `field=value` settings over it, as a command line gives them.

    Several values are written with commas: `offload=parameters,optimizer`. Raises PlanError for what is no setting.
    """
    values: dict[str, Any] = {}
    for setting in settings:
        name, equals, text = (part.strip() for part in setting.partition("="))
        if not equals:
            raise PlanError(f"'{setting}' is no setting of a plan. Write field=value, such as shard=4.")
        _check_name(name)
        if name in values:
            raise PlanError(f"{name} is set twice, at last by '{setting}'. Set it once.")
        values[name] = _value_of(name, text)
    return replace(start or Plan(), **values)


def plan_on(devices: int, settings: Sequence[str]) -> Plan:
    """The plan of `field=value` settings on this many devices: replicas fill what the other axes leave of them."""
    axes = [setting for setting in settings if setting.partition("=")[0].strip() in AXES]
    if any(setting.partition("=")[0].strip() == "data" for setting in axes):
        return plan_from_settings(settings)
    taken = plan_from_settings(axes).devices
    return plan_from_settings(settings, Plan(data=devices // taken if devices % taken == 0 else 1))


def _value_of(name: str, text: str) -> Any:
    default = getattr(Plan(), name)
    if default is None:
        return None if text in ("", "none") else text
    if isinstance(default, bool):
        return {"true": True, "false": False}.get(text.lower(), text)
    if isinstance(default, int):
        try:
            return int(text)
        except ValueError:
            return text
    if isinstance(default, tuple):
        return () if text in ("", "none") else tuple(part.strip() for part in text.split(","))
    if name == "recompute" and text not in RECOMPUTES and ("," in text or "." in text):
        return tuple(part.strip() for part in text.split(",") if part.strip())
    return text


def _check_name(name: str) -> None:
    known = {f.name for f in fields(Plan)}
    if name not in known:
        raise PlanError(f"a plan has no field '{name}'.{nearest(name, known)} Known are {', '.join(sorted(known))}.")


def _recompute(value: Any) -> str | tuple[str, ...]:
    if isinstance(value, str):
        if value in RECOMPUTES:
            return value
        raise PlanError(
            f"recompute={value!r} is not known.{nearest(value, RECOMPUTES)} Use one of {', '.join(RECOMPUTES)}, or the "
            f"names of blocks: recompute=({value!r},), or with a comma behind it, --set recompute={value or 'NAME'},"
        )
    names = _words("recompute", value)
    if not names:
        raise PlanError("recompute names no block. Write recompute='none', or the names of blocks.")
    return names


def _offload(value: Any) -> tuple[str, ...]:
    names = _words("offload", value)
    for name in names:
        if name not in OFFLOADS:
            raise PlanError(
                f"offload={name!r} is not known.{nearest(name, OFFLOADS)} Use some of {', '.join(OFFLOADS)}."
            )
    return tuple(name for name in OFFLOADS if name in names)


def _words(field: str, value: Any) -> tuple[str, ...]:
    if not isinstance(value, tuple | list) or not all(isinstance(word, str) for word in value):
        raise PlanError(
            f"{field}={value!r}: must be a tuple of names. Write {field}=('...',); in a file, {field} = ['...']."
        )
    if len(set(value)) < len(value):
        raise PlanError(f"{field}={tuple(value)!r} names something twice.")
    return tuple(value)


def _toml_value(value: bool | int | str | tuple[str, ...]) -> str:
    if isinstance(value, tuple):
        return f"[{', '.join(map(_toml_value, value))}]"
    if isinstance(value, bool):
        return "true" if value else "false"
    return '"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"' if isinstance(value, str) else str(value)
