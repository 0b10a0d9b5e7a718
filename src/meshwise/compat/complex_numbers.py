"""Convert a model's dtype without dropping the imaginary parts of complex numbers.

torch's `model.to(torch.float64)` drops them.

Read in torch 2.11, 2.13 and 2.15: `nn/modules/module.py`, `to`. Tested in tests/parallel/test_complex.py.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

WIDE = {
    torch.float32: torch.float64,
    torch.float16: torch.float64,
    torch.bfloat16: torch.float64,
    torch.complex64: torch.complex128,
    torch.complex32: torch.complex128,
}
"""For each narrow floating or complex dtype, the wider dtype in which `meshwise check` computes in its place."""


def stored_in(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Return `tensor` converted to `dtype` if it is a floating tensor, and unchanged if it holds integers. A complex
    tensor is converted to complex128 if `dtype` is float64. It is not converted for any other `dtype`, because torch
    has no kernels for narrow complex dtypes."""
    if tensor.is_complex():
        return tensor.to(torch.complex128) if dtype == torch.float64 else tensor
    return tensor.to(dtype) if tensor.is_floating_point() else tensor


def store_model(model: nn.Module, dtype: torch.dtype) -> None:
    """Convert the parameters, gradients and buffers of `model` to `dtype`, in place. Integer tensors stay as they are.
    Complex tensors become complex128 if `dtype` is float64, and stay as they are for any other `dtype`."""
    model._apply(lambda tensor: stored_in(tensor, dtype))


def as_real(tensor: Tensor) -> Tensor:
    """View complex numbers as pairs of real ones, in a last dimension of two; return other tensors unchanged."""
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor
