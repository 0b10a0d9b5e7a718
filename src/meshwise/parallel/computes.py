"""Check that a device computes in the precision of a plan.

The check runs small operators on the device, before a run.

Tested in tests/parallel/test_precision.py.
"""

from __future__ import annotations

import functools
import textwrap

import torch
from torch import Tensor, nn

from meshwise.compat.driver import computes_bf16
from meshwise.parallel.reduction import TORCH
from meshwise.spec.dtypes import Dtypes
from meshwise.spec.errors import PlanError


def check_computes(model: nn.Module | None, device: str, dtypes: Dtypes) -> None:
    """Raise PlanError if torch cannot compute in the precision of `dtypes` on `device`.

    A short trial decides this. It runs a matrix product, and also an LSTM if `model` contains an LSTM, because torch
    2.13 cannot compute an LSTM in float16 on CPU.
    """
    computed = dtypes.computed
    if computed in ("fp64", "fp32"):
        return
    if computed == "bf16" and not computes_bf16(device):
        raise PlanError(f"{lacks(device, computed)}: this GPU is too old for {computed}. {instead(computed)}")
    with_lstm = model is not None and any(isinstance(part, nn.LSTM) for part in model.modules())
    for kind_of, wrong in _tried(device, computed, with_lstm):
        other = "fp32" if _tried(device, "bf16", with_lstm) else "bf16"
        raise PlanError(f"{lacks(device, computed)}: a trial of {kind_of} failed ({wrong}). {_use(other)}")


@functools.cache
def _tried(device: str, computed: str, with_lstm: bool) -> list[tuple[str, str]]:
    """Run an `nn.Linear` on the device in the precision `computed`, forward and backward. With `with_lstm`, run an
    `nn.LSTM`, too. Returns the class name and torch's error message for each module that fails."""
    failed = []
    with torch.random.fork_rng(), torch.enable_grad():  # start values are drawn
        parts: list[nn.Module] = [nn.Linear(1, 1), *([nn.LSTM(1, 1)] if with_lstm else [])]
        for part in parts:
            try:
                with torch.autocast(device.split(":")[0], TORCH[computed]):
                    result = part.to(device)(torch.ones(2, 1, 1, device=device))
                (result if isinstance(result, Tensor) else result[0]).float().sum().backward()
            except RuntimeError as error:
                failed.append((type(part).__name__, textwrap.shorten(str(error), 100, placeholder=" …")))
    return failed


def lacks(device: str, computed: str) -> str:
    """Return the beginning of an error message: torch cannot compute in a dtype on this device.

    computed: the dtype, such as `fp16`.
    """
    return f"compute_dtype='{computed}': torch {torch.__version__} cannot compute {computed} on {device.split(':')[0]}"


def instead(computed: str) -> str:
    """Return a sentence that recommends another precision.

    computed: the dtype in which the device cannot compute.
    """
    return _use("bf16" if computed == "fp16" else "fp32")


def _use(precision: str) -> str:
    return f"Use precision='{precision}', or a device that can compute in this dtype."
