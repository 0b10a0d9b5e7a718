"""Define the plan: a job's mesh axes and techniques.

A plan is a small value. Its repr is the Python expression that creates it.

A plan names the mesh axes (`data` replicas, each divided over `shard` devices), what a step is cut into, and the
techniques that trade time for memory. Each field declares what it divides and what it cannot be combined with.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import Any

from meshwise.spec.dtypes import PRECISIONS as PRECISIONS
from meshwise.spec.dtypes import Dtypes, dtypes_of
from meshwise.spec.errors import PlanError, check_known, nearest

SCHEDULES = {
    "1f1b": "one forward and one backward in turn: a stage keeps activations of a microbatch for each later stage",
    "gpipe": "all forwards, then all backwards: simple, and keeps the activations of every microbatch",
    "interleaved": "1f1b with two stages per rank: about half the idle time, and more messages",
}
RECOMPUTES = {
    "none": "all activations are kept for the backward",
    "full": "each block keeps only its input and runs again in the backward",
    "selective": "each block keeps its input and expensive results (matrix products, attention); the rest runs again",
}
OFFLOADS = {
    "optimizer": "the optimizer's state is kept in the host's memory",
    "parameters": "this rank's part of the parameters is kept in the host's memory",
    "activations": "activations wait in the host's memory for the backward",
}

BATCH_NORMS = {
    "global": "batch norms take the statistics of the whole global microbatch, as one device does",
    "local": "each rank uses the statistics of its own samples: no communication, but other numbers",
}

_ZERO1 = " with zero1=True is not supported. Use shard={plan.data} instead, which divides more."
_ON_HOST = " with offload='parameters' is not supported yet. Use offload='optimizer', or shard."
_COMPILED = " with compile=True: split tensors are not compiled. Remove compile."


@dataclass(frozen=True)
class Conflict:
    """A combination that a plan must not have. If `when` returns True for a plan, PlanError is raised with the text
    `message`, in which `{plan}` stands for that plan."""

    when: Callable[[Plan], bool]
    message: str


def _axis(*conflicts: Conflict, divides: str = "", same_samples: bool = False) -> Any:
    """Declare a field of `Plan` for the size of a mesh axis."""
    return field(default=1, metadata=locals() | {"axis": True})


def _not_yet(own: str, other: str) -> Conflict:
    message = f"{own}={{plan.{own}}} with {other}={{plan.{other}!r}} is not supported yet. Remove {other}."
    return Conflict(lambda plan: bool(getattr(plan, other) != getattr(Plan, other)), message)


def _technique(default: Any, *conflicts: Conflict, divides: str = "", tries: Any = (), saves: Any = None) -> Any:
    """Declare a field of `Plan` for a technique, such as `zero1`."""
    return field(default=default, metadata=locals())


@dataclass(frozen=True, repr=False)
class Plan:
    """How a job uses the devices of a machine.

    data: replicas of the model; each computes its share of every global batch.
    shard: devices over which parameters, gradients and optimizer state are sharded; each computes its share of a batch.
    expert: devices over which the experts of a mixture are divided; each computes its share of a batch, and tokens are
        sent to their experts.
    pipeline: devices over which the model's blocks are split into stages (pipeline parallel); all work on the same
        samples, one microbatch after the other, with `accumulate` microbatches in a step.
    context: devices over which the positions of each sample are divided, in attention too (context parallel).
    tensor: devices over which the weights of layers are split (tensor parallel); all work on the same samples.
    sequence: whether activations between the layers that `tensor` splits are divided along positions.
    schedule: one of `SCHEDULES`: the order in which a pipeline stage runs its forwards and backwards.
    accumulate: microbatches into which a global batch is split; their gradients add up before one optimizer step.
    precision: one of `PRECISIONS`, a word that sets the three dtypes below.
    param_dtype: the dtype in which parameters (the master weights) are stored. By default float32.
    compute_dtype: the dtype of matrix products, and of sharded parameters while they are gathered.
    grad_dtype: the dtype in which gradients are summed over ranks. By default `param_dtype`.
    zero1: whether the optimizer's state is sharded over the replicas, while parameters stay replicated.
    recompute: one of `RECOMPUTES`, or the names of the blocks whose forward runs again in the backward.
    offload: names from `OFFLOADS`, for what is kept in the host's memory.
    reduce_each: whether gradients are reduced after each microbatch, so that a rank keeps only its shard of them. By
        default, every rank keeps the gradients of the whole model until the last microbatch.
    reshard: whether a block's gathered parameters are freed after its forward and gathered again for its backward.
    compile: whether each block is compiled.
    batch_norm: one of `BATCH_NORMS`: over which samples batch norms take their statistics.
    shares: how a batch is divided over the replicas, of which there are data × shard × expert. With (2, 1), the first
        gets twice as many samples as the second. By default, all get equally many. A step's result is always the same.
    bucket_mb: MiB of gradients to reduce in one all-reduce (25 is DistributedDataParallel's default).
    """

    data: int = _axis()
    shard: int = _axis(divides="parameters")
    expert: int = _axis(
        *(_not_yet("expert", name) for name in ("pipeline", "context", "tensor")),
        Conflict(lambda plan: plan.zero1, "expert={plan.expert}" + _ZERO1),
        Conflict(lambda plan: "parameters" in plan.offload, "expert={plan.expert}" + _ON_HOST),
        divides="parameters",
    )
    pipeline: int = _axis(
        Conflict(
            lambda plan: plan.accumulate < plan.pipeline,
            "pipeline={plan.pipeline} with accumulate={plan.accumulate}: each stage works on another microbatch, so a "
            "step needs at least {plan.pipeline} microbatches. Use accumulate={plan.pipeline} or more.",
        ),
        _not_yet("pipeline", "compile"),
        Conflict(lambda plan: "parameters" in plan.offload, "pipeline={plan.pipeline}" + _ON_HOST),
        same_samples=True,
    )
    context: int = _axis(
        Conflict(lambda plan: plan.compile, "context={plan.context}" + _COMPILED),
        same_samples=True,
    )
    tensor: int = _axis(
        Conflict(lambda plan: plan.compile, "tensor={plan.tensor}" + _COMPILED),
        Conflict(lambda plan: plan.zero1, "tensor={plan.tensor}" + _ZERO1),
        divides="parameters",
        same_samples=True,
    )
    sequence: bool = _technique(
        False,
        Conflict(lambda plan: plan.tensor == 1, "sequence=True has no effect with tensor=1. Remove it."),
        tries=(True,),
    )
    schedule: str = _technique(
        "1f1b",
        Conflict(
            lambda plan: plan.pipeline == 1, "schedule='{plan.schedule}' has no effect with pipeline=1. Remove it."
        ),
    )
    accumulate: int = 1
    precision: str = "fp32"
    zero1: bool = _technique(
        False,
        Conflict(
            lambda plan: plan.parameters_divided,
            "zero1=True with shard={plan.shard}: shard divides the optimizer's state already. Remove zero1.",
        ),
        Conflict(
            lambda plan: plan.data == 1,
            "zero1=True divides the optimizer's state over replicas, and data=1 has only one. Use data=2 or more, or "
            "remove zero1.",
        ),
        divides="state",
        tries=(True,),
        saves=True,
    )
    recompute: str | tuple[str, ...] = _technique("none", tries=("selective", "full"), saves="full")
    offload: tuple[str, ...] = _technique(
        (),
        Conflict(
            lambda plan: "parameters" in plan.offload and plan.shard == 1,
            "offload='parameters' keeps each rank's part of the parameters in the host's memory, but shard=1 does not "
            "divide them. Use shard=2 or more, or offload='optimizer'.",
        ),
    )
    reduce_each: bool = _technique(
        False,
        Conflict(lambda plan: plan.shard == 1, "reduce_each=True has no effect with shard=1. Remove it."),
        Conflict(lambda plan: plan.accumulate == 1, "reduce_each=True has no effect with accumulate=1. Remove it."),
        _not_yet("reduce_each", "pipeline"),
        tries=(True,),
    )
    reshard: bool = _technique(
        True,
        Conflict(lambda plan: plan.shard == 1, "reshard=False has no effect with shard=1. Remove it."),
    )
    compile: bool = _technique(
        False,
        Conflict(
            lambda plan: plan.recompute == "selective",
            "compile=True with recompute='selective': compiled code has no separate operators to select from. Use "
            "recompute='full', or the names of blocks, or remove compile.",
        ),
    )
    batch_norm: str = _technique(
        "global",
        Conflict(lambda plan: plan.devices == 1, "batch_norm='local' has no effect on one device. Remove it."),
    )
    shares: tuple[float, ...] = _technique(
        (),
        Conflict(
            lambda plan: len(plan.shares) != plan.replicas,
            "shares={plan.shares}: a batch is divided into {plan.replicas} parts (data × shard × expert). Write "
            "{plan.replicas} numbers, or remove shares.",
        ),
        Conflict(lambda plan: plan.replicas == 1, "shares={plan.shares} has no effect with one replica. Remove it."),
    )
    bucket_mb: int = 25
    param_dtype: str | None = None
    compute_dtype: str | None = None
    grad_dtype: str | None = None

    def __post_init__(self) -> None:
        for f in fields(self):
            _check_type(f.name, getattr(self, f.name), f.default)
        check_known("precision", self.precision, PRECISIONS, PlanError)
        check_known("schedule", self.schedule, SCHEDULES, PlanError)
        check_known("batch_norm", self.batch_norm, BATCH_NORMS, PlanError)
        dtypes_of(self.precision, self.param_dtype, self.compute_dtype, self.grad_dtype)
        object.__setattr__(self, "recompute", _recompute(self.recompute))
        object.__setattr__(self, "offload", _offload(self.offload))
        object.__setattr__(self, "shares", _shares(self.shares))
        for f in fields(self):
            for conflict in f.metadata.get("conflicts", ()):
                if getattr(self, f.name) != f.default and conflict.when(self):
                    raise PlanError(conflict.message.format(plan=self))

    @property
    def devices(self) -> int:
        """The number of devices that the plan needs."""
        return math.prod(getattr(self, axis) for axis in AXES)

    @property
    def within_samples(self) -> int:
        """The number of ranks that work on the same samples: the product of the axes pipeline, context and tensor."""
        return math.prod(getattr(self, f.name) for f in fields(self) if f.metadata.get("same_samples"))

    @property
    def replicas(self) -> int:
        """How many groups of ranks process different samples of a batch: data × shard × expert."""
        return self.devices // self.within_samples

    @property
    def split(self) -> bool:
        """Whether parameters are split over ranks that work on the same samples."""
        same = [f for f in fields(self) if f.metadata.get("same_samples") and f.metadata["divides"]]
        return any(getattr(self, f.name) > 1 for f in same)

    @property
    def parameters_divided(self) -> bool:
        """Whether each rank holds only a part of the parameters, with their gradients and optimizer state."""
        return self._divides("parameters")

    @property
    def state_divided(self) -> bool:
        """Whether each rank holds only a part of the optimizer's state."""
        return self.parameters_divided or self._divides("state")

    @property
    def state_parts(self) -> int:
        """Into how many parts the `data` replicas divide the optimizer's state. 1 if it is not divided."""
        return self.data if self._divides("state") else 1

    def _divides(self, what: str) -> bool:
        return any(getattr(self, name) != default for name, default in _DIVIDING[what])

    @property
    def dtypes(self) -> Dtypes:
        """The dtypes in which the plan stores parameters, computes, and reduces gradients."""
        return dtypes_of(self.precision, self.param_dtype, self.compute_dtype, self.grad_dtype)

    def __repr__(self) -> str:
        return f"Plan({', '.join(f'{name}={value!r}' for name, value in changed(self).items())})"


_DIVIDING = {
    what: tuple((f.name, f.default) for f in fields(Plan) if f.metadata.get("divides") == what)
    for what in ("parameters", "state")
}
AXES = tuple(f.name for f in fields(Plan) if f.metadata.get("axis"))
"""The mesh axes, outermost first. Ranks of the last axis are on neighboring devices, whose links are the fastest."""

OWN_DTYPES: dict[str, Any] = {"param_dtype": None, "compute_dtype": None, "grad_dtype": None}
"""The fields for the three dtypes that `precision` sets, with their default values."""


def changed(plan: Plan) -> dict[str, Any]:
    """Return the fields of a plan that differ from their defaults. A plan for one device also has `data`, so that its
    text is not empty."""
    one = plan.devices == 1
    return {
        f.name: getattr(plan, f.name)
        for f in fields(plan)
        if getattr(plan, f.name) != f.default or (one and f.name == "data")
    }


def _check_type(name: str, value: Any, default: Any) -> None:
    """Raise PlanError if an integer field is not an integer of at least 1, or a boolean field is not a bool."""
    if isinstance(default, bool):
        if not isinstance(value, bool):
            raise PlanError(f"{name}={value!r} must be True or False (true or false in a file).")
    elif isinstance(default, int) and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
        raise PlanError(f"{name}={value!r} must be a whole number of at least 1. Use {name}=1.")


def _recompute(value: Any) -> str | tuple[str, ...]:
    if isinstance(value, str):
        if value in RECOMPUTES:
            return value
        raise PlanError(
            f"recompute={value!r} is not known.{nearest(value, RECOMPUTES)} Use one of {', '.join(RECOMPUTES)}, or "
            f"names of blocks: recompute=({value!r},), or --set recompute={value or 'NAME'}, (with the comma)."
        )
    names = _words("recompute", value)
    if not names:
        raise PlanError("recompute is empty. Write recompute='none', or the names of blocks.")
    return names


def _offload(value: Any) -> tuple[str, ...]:
    names = _words("offload", value)
    for name in names:
        check_known("offload", name, OFFLOADS, PlanError)
    return tuple(name for name in OFFLOADS if name in names)


def _shares(value: Any) -> tuple[float, ...]:
    """Convert the field `shares` to numbers: ("2", "1") -> (2, 1). Return (), the default, if all shares are equal."""
    try:
        if isinstance(value, str):
            raise ValueError
        shares = tuple(float(share) for share in value)
        if not all(0 < share < math.inf for share in shares):
            raise ValueError
    except (TypeError, ValueError):
        raise PlanError(
            f"shares={value!r} must be numbers above 0, one for each replica. Write shares=(2, 1), in a file shares = "
            "[2, 1], or --set shares=2,1."
        ) from None
    return () if len(set(shares)) < 2 and shares[1:] else tuple(int(s) if s.is_integer() else s for s in shares)


def _words(field: str, value: Any) -> tuple[str, ...]:
    if not isinstance(value, tuple | list) or not all(isinstance(word, str) for word in value):
        raise PlanError(
            f"{field}={value!r} must be a tuple of names. Write {field}=('...',); in a file, {field} = ['...']."
        )
    if len(set(value)) < len(value):
        raise PlanError(f"{field}={tuple(value)!r} contains a name twice. Write each name once.")
    return tuple(value)
