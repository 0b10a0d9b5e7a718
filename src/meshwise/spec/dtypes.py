"""Dtypes: what numbers are stored in, computed in and reduced in, each by its short word.

The word `precision` of a plan stands for three of them, and a field of the plan for each may say otherwise. Parameters
that are stored are the master weights: the optimizer steps them, and keeps its state in their dtype.
"""

from __future__ import annotations

from dataclasses import dataclass

from meshwise.spec.errors import PlanError, nearest

WIDTHS = {"fp64": 3, "fp32": 2, "bf16": 1, "fp16": 1}
PRECISIONS = {
    "fp32": "parameters and computing in float32",
    "bf16": "parameters in float32, computing under autocast in bfloat16",
    "fp16": "parameters in float32, computing under autocast in float16, loss scaled",
    "fp64": "parameters and computing in float64",
}


@dataclass(frozen=True)
class Dtypes:
    """Which dtype is used for what.

    stored: parameters, their `.grad` and the optimizer's state.
    computed: matrix products of forward and backward (autocast, where it is narrower than `stored`), and what a shard
        gathers of their weights.
    reduced: gradients while they are added over ranks.
    """

    stored: str
    computed: str
    reduced: str

    @property
    def scaled(self) -> bool:
        """Whether the loss is scaled, so that small gradients are not lost."""
        return self.computed == "fp16"


def dtypes_of(
    precision: str, param_dtype: str | None = None, compute_dtype: str | None = None, grad_dtype: str | None = None
) -> Dtypes:
    """The dtypes that the word `precision` means, where the others do not say otherwise.

    By default what is computed is the word's, or `param_dtype` where that is narrower, and gradients are reduced in
    what is stored. Raises PlanError for what cannot be joined.
    """
    given = {"param_dtype": param_dtype, "compute_dtype": compute_dtype, "grad_dtype": grad_dtype}
    for name, value in given.items():
        if value is not None and value not in tuple(WIDTHS):  # a plan file may hold what has no hash
            raise PlanError(f"{name}={value!r} is not known.{nearest(str(value), WIDTHS)} Use one of {_words()}.")
    stored = param_dtype or ("fp64" if precision == "fp64" else "fp32")
    computed = compute_dtype or (precision if WIDTHS[precision] <= WIDTHS[stored] else stored)
    found = Dtypes(stored, computed, grad_dtype or stored)
    _check(found)
    return found


def _check(dtypes: Dtypes) -> None:
    words = {"param_dtype": dtypes.stored, "compute_dtype": dtypes.computed, "grad_dtype": dtypes.reduced}
    if dtypes.stored == "fp16":
        raise PlanError(
            "param_dtype='fp16': steps of an optimizer are lost in what float16 can hold, and torch scales no gradient "
            "of it. Store in fp32 and compute in fp16 (precision='fp16'), or store in bf16."
        )
    if "fp64" in words.values() and set(words.values()) != {"fp64"}:
        text = ", ".join(f"{name}={word!r}" for name, word in words.items())
        raise PlanError(f"{text}: float64 is for all of them or for none. Write precision='fp64' alone.")
    same = dtypes.stored == dtypes.computed
    if not same and WIDTHS[dtypes.computed] >= WIDTHS[dtypes.stored]:
        raise PlanError(
            f"compute_dtype={dtypes.computed!r} with param_dtype={dtypes.stored!r}: what is stored narrower gains "
            f"nothing from it. Write param_dtype='fp32', or compute_dtype={dtypes.stored!r}."
        )


def _words() -> str:
    return ", ".join(reversed(WIDTHS))
