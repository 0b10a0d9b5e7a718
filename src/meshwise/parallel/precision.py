"""Set the dtypes of parameters and of computation.

Parameters are the master weights. If the compute dtype is narrower, autocast casts the inputs of matrix products. With
shard, parameters that autocast would cast are already gathered in the narrow dtype, which gives bitwise the same
numbers with half the bytes.
"""

from __future__ import annotations

import contextlib
import functools
import textwrap
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from meshwise.parallel.technique import TORCH, Setup, Technique, reduced_in
from meshwise.spec.dtypes import Dtypes
from meshwise.spec.errors import PlanError
from meshwise.torch_compat.driver import computes_bf16
from meshwise.torch_compat.modules import put_forward, store_model, stored_in
from meshwise.torch_compat.tree import map_tensors

LACKS = ("not implemented for", "could not create a primitive", "does not support")  # texts of missing-operator errors
CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
CAST = (nn.Linear, *CONVOLUTIONS, nn.LSTM, nn.MultiheadAttention)  # layers whose weights autocast casts


def check_computes(model: nn.Module | None, device: str, dtypes: Dtypes) -> None:
    """Raise PlanError if torch cannot compute in the precision of `dtypes` on `device`."""
    computed = dtypes.computed
    if computed in ("fp64", "fp32"):
        return
    if computed == "bf16" and not computes_bf16(device):
        raise PlanError(f"{_lacks(device, computed)}: this GPU is too old for {computed}. {_use('fp32')}")
    with_lstm = model is not None and any(isinstance(part, nn.LSTM) for part in model.modules())
    for kind_of, wrong in _tried(device, computed, with_lstm):
        other = "fp32" if _tried(device, "bf16", with_lstm) else "bf16"
        raise PlanError(f"{_lacks(device, computed)}: a trial of {kind_of} failed ({wrong}). {_use(other)}")


@functools.cache
def _tried(device: str, computed: str, with_lstm: bool) -> list[tuple[str, str]]:
    """Run small layers forward and backward in the precision `computed`. Return (layer, error) of each failure."""
    failed = []
    with torch.random.fork_rng(), torch.enable_grad():  # creating layers draws random numbers
        parts: list[nn.Module] = [nn.Linear(1, 1), *([nn.LSTM(1, 1)] if with_lstm else [])]
        for part in parts:
            try:
                with torch.autocast(device.split(":")[0], TORCH[computed]):
                    result = part.to(device)(torch.ones(2, 1, 1, device=device))
                (result if isinstance(result, Tensor) else result[0]).float().sum().backward()
            except RuntimeError as error:
                failed.append((type(part).__name__, textwrap.shorten(str(error), 100, placeholder=" …")))
    return failed


def _lacks(device: str, computed: str) -> str:
    return f"compute_dtype='{computed}': torch {torch.__version__} cannot compute {computed} on {device.split(':')[0]}"


def _use(precision: str) -> str:
    return f"Use precision='{precision}', or a device that can compute in this dtype."


def store_parameters(model: nn.Module, dtypes: Dtypes) -> None:
    """Convert the parameters and buffers of `model` to the stored dtype in place, unless that dtype is float32.

    Only floating-point tensors are converted. Complex tensors are converted only if the stored dtype is float64.
    """
    if dtypes.stored != "fp32":
        store_model(model, TORCH[dtypes.stored])


@contextlib.contextmanager
def computing(device: str, dtypes: Dtypes) -> Iterator[None]:
    """Make forwards inside the `with` block compute in `dtypes.computed`, by means of autocast. Raises PlanError if
    torch lacks an operator in this dtype.

    device: the type of device, e.g. "cuda".
    """
    cast = dtypes.computed != dtypes.stored
    narrow = torch.autocast(device.split(":")[0], TORCH[dtypes.computed]) if cast else contextlib.nullcontext()
    with saying_what_lacks(device, dtypes), narrow:
        yield


def compute_in(model: nn.Module, dtypes: Dtypes, device: str) -> None:
    """Make the model's forward compute in the compute dtype and return float32, which the loss needs."""
    put_forward(model, functools.partial(_computed, model.forward, dtypes, device))


def _computed(forward: Callable[..., Any], dtypes: Dtypes, device: str, /, *arguments: Any, **keywords: Any) -> Any:
    with computing(device, dtypes):
        result = forward(*arguments, **keywords)
    return map_tensors(lambda each: each.float() if each.dtype in (torch.bfloat16, torch.float16) else each, result)


@contextlib.contextmanager
def saying_what_lacks(device: str, dtypes: Dtypes) -> Iterator[None]:
    """Convert torch's error about a missing operator, raised inside the `with` block, to a PlanError with advice."""
    computed = dtypes.computed
    try:
        yield
    except RuntimeError as error:
        if computed in ("fp64", "fp32") or not any(words in str(error) for words in LACKS):
            raise
        other = "bf16" if computed == "fp16" else "fp32"
        raise PlanError(f"{_lacks(device, computed)}: {str(error).splitlines()[0]}. {_use(other)}") from error


def cast_batch(batch: Any, dtypes: Dtypes) -> Any:
    """Cast floating-point and complex tensors of a batch to the stored dtype of parameters, unless that dtype is
    float32."""
    if dtypes.stored == "fp32":
        return batch
    return map_tensors(lambda tensor: stored_in(tensor, TORCH[dtypes.stored]), batch)


def gathered_narrow(model: nn.Module) -> set[int]:
    """Return the ids of the parameters that autocast always casts before use."""
    cast: dict[int, bool] = {}
    for part in model.modules():
        for p in part.parameters(recurse=False):
            cast[id(p)] = cast.get(id(p), True) and isinstance(part, CAST) and p.ndim > 1 and p.is_floating_point()
    return {key for key, always in cast.items() if always}


def _apply(setup: Setup) -> None:
    dtypes = setup.plan.dtypes
    store_parameters(setup.model, dtypes)
    gathered = TORCH[dtypes.computed] if dtypes.computed != dtypes.stored else None
    if gathered or reduced_in(dtypes):  # autocast, not FSDP, casts the inputs
        setup.gather_dtypes = MixedPrecisionPolicy(gathered, TORCH[dtypes.reduced], cast_forward_inputs=False)
    setup.gathered_narrow = gathered_narrow(setup.model)


PRECISION = Technique(lambda setup: check_computes(setup.model, setup.world.device, setup.plan.dtypes), _apply)
