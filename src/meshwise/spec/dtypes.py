"""Name the dtypes of storage, computation and reduction by short words.

A plan's `precision` is one word for all three dtypes. The plan also has a field for each of them, which takes
precedence. The stored parameters are the master weights: the optimizer updates them and keeps its state in their dtype.
"""

from __future__ import annotations

from dataclasses import dataclass

from meshwise.spec.errors import PlanError, check_known

SAFETENSORS = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "complex64": "C64",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint64": "U64",
    "uint32": "U32",
    "uint16": "U16",
    "uint8": "U8",
    "bool": "BOOL",
}
"""The names of torch's dtypes in safetensors files."""
WIDTHS = {"fp16": 1, "bf16": 1, "fp32": 2, "fp64": 3}
PRECISIONS = {
    "fp32": "parameters and computing in float32",
    "bf16": "parameters in float32, computing under autocast in bfloat16",
    "fp16": "parameters in float32, computing under autocast in float16, loss scaled",
    "fp64": "parameters and computing in float64",
}


@dataclass(frozen=True)
class Dtypes:
    """The dtypes in which a plan stores, computes and reduces. Raises PlanError for combinations that do not work.

    stored: the dtype of parameters, their `.grad` and the optimizer's state.
    computed: the dtype of matrix products in forward and backward (by autocast if narrower than `stored`), and of
        sharded parameters while they are gathered.
    reduced: the dtype of gradients while they are summed over ranks.
    """

    stored: str
    computed: str
    reduced: str

    def __post_init__(self) -> None:
        if self.stored == "fp16":
            raise PlanError(
                "param_dtype='fp16': float16 cannot store the small updates of an optimizer, and torch cannot scale "
                "float16 gradients. Use precision='fp16', which stores in fp32 and computes in fp16, or store in bf16."
            )
        words = self.by_field.values()
        if "fp64" in words and set(words) != {"fp64"}:
            text = ", ".join(f"{name}={word!r}" for name, word in self.by_field.items())
            raise PlanError(f"{text}: fp64 cannot be mixed with other dtypes. Write only precision='fp64'.")
        if self.stored != self.computed and WIDTHS[self.computed] >= WIDTHS[self.stored]:
            raise PlanError(
                f"compute_dtype={self.computed!r} with param_dtype={self.stored!r}: compute_dtype must be equal to "
                f"param_dtype, or narrower. Write param_dtype='fp32', or compute_dtype={self.stored!r}."
            )

    @property
    def by_field(self) -> dict[str, str]:
        """The dtype for each of the plan's fields `param_dtype`, `compute_dtype` and `grad_dtype`."""
        return {"param_dtype": self.stored, "compute_dtype": self.computed, "grad_dtype": self.reduced}

    @property
    def scaled(self) -> bool:
        """Whether the loss is scaled (GradScaler), so that small gradients do not underflow in fp16."""
        return self.computed == "fp16"


def dtypes_of(
    precision: str, param_dtype: str | None = None, compute_dtype: str | None = None, grad_dtype: str | None = None
) -> Dtypes:
    """Return the dtypes of a plan with these fields. `precision` sets all three dtypes, and each other argument
    replaces one of them.

    Raises PlanError for combinations that do not work.
    param_dtype: the dtype of stored parameters. By default `fp32`, or `fp64` if that is the precision.
    compute_dtype: the dtype of matrix products. By default the dtype `precision`, or the stored dtype if that is
        narrower.
    grad_dtype: the dtype in which gradients are summed over ranks. By default the stored dtype.
    """
    given = {"param_dtype": param_dtype, "compute_dtype": compute_dtype, "grad_dtype": grad_dtype}
    for name, value in given.items():
        if value is not None:
            check_known(name, value, WIDTHS, PlanError)
    stored = param_dtype or ("fp64" if precision == "fp64" else "fp32")
    computed = compute_dtype or (precision if WIDTHS[precision] <= WIDTHS[stored] else stored)
    return Dtypes(stored, computed, grad_dtype or stored)
