"""Imitate CUDA's autocast on the fake device.

Autocast decides which operators run in a narrow dtype and which in float32, and caches cast weights.

CUDA's casts are kernels in C++ that no other device has. The lists of operators are from
`aten/src/ATen/autocast_mode.h` of torch 2.13.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from meshwise.torch_compat.tree import map_tensors, tensors_in

KEY = "AutocastPrivateUse1"


NARROW = """
    conv1d conv2d conv3d conv_transpose1d conv_transpose2d.input conv_transpose3d.input convolution prelu addmm
    addmv addr matmul einsum mm mv linalg_vecdot linear addbmm baddbmm bmm chain_matmul linalg_multi_dot
    _thnn_fused_lstm_cell _thnn_fused_gru_cell lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell
    scaled_dot_product_attention
    """
FLOAT32 = """
    acos asin cosh erfinv exp expm1 log log10 log2 log1p reciprocal rsqrt sinh tan pow.Tensor_Scalar
    pow.Tensor_Tensor pow.Scalar softplus layer_norm native_layer_norm group_norm frobenius_norm.dim
    nuclear_norm nuclear_norm.dim cosine_similarity poisson_nll_loss cosine_embedding_loss nll_loss nll_loss2d
    hinge_embedding_loss kl_div l1_loss smooth_l1_loss huber_loss mse_loss margin_ranking_loss
    multilabel_margin_loss soft_margin_loss triplet_margin_loss multi_margin_loss
    binary_cross_entropy_with_logits dist pdist cdist renorm logsumexp upsample_nearest1d upsample_nearest2d
    upsample_bilinear2d upsample_bicubic2d softmax.int log_softmax.int cumprod cumsum prod prod.dim_int sum
    sum.dim_IntList norm.Scalar
    """
WIDEST = """
    addcdiv addcmul atan2 bilinear cross dot vdot grid_sampler index_put tensordot scatter_add
    scaled_dot_product_attention_ cat stack
    """
_KEYS = torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, KEY))
_cache: dict[int, tuple[weakref.ref[Tensor], Tensor]] = {}


def register() -> list[torch.library.Library]:
    """Make autocast work on the fake device."""
    through = torch.library.Library("_", "IMPL")
    through.fallback(torch.library.fallthrough_kernel, KEY)
    library = torch.library.Library("aten", "IMPL")
    for names, dtype_of in ((NARROW, _narrow), (FLOAT32, lambda tensors: torch.float32), (WIDEST, _widest)):
        for name in names.split():
            packet, _, overload = name.partition(".")
            operator = getattr(getattr(torch.ops.aten, packet, None), overload or "default", None)
            if operator is not None:
                library.impl(operator, functools.partial(_cast_and_call, operator, dtype_of), KEY)
    clear = torch.clear_autocast_cache

    def cleared() -> None:
        _cache.clear()
        clear()

    torch.clear_autocast_cache = cleared
    return [through, library]


def _cast_and_call(operator: Any, dtype_of: Callable[[list[Tensor]], torch.dtype], /, *args: Any, **kwargs: Any) -> Any:
    dtype = dtype_of(list(tensors_in((args, kwargs))))
    with torch._C._ExcludeDispatchKeyGuard(_KEYS):
        args, kwargs = map_tensors(lambda tensor: _cast(tensor, dtype), (args, kwargs))
        return operator(*args, **kwargs)


def _narrow(tensors: list[Tensor]) -> torch.dtype:
    return torch.get_autocast_dtype("sim")


def _widest(tensors: list[Tensor]) -> torch.dtype:
    return torch.float32 if any(t.dtype == torch.float32 for t in tensors) else _narrow(tensors)


def _cast(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    eligible = tensor.is_floating_point() and tensor.device.type == "sim" and tensor.dtype != torch.float64
    if not eligible or tensor.dtype == dtype:
        return tensor
    kept = tensor.dtype == torch.float32 and tensor.is_leaf and tensor.requires_grad and dtype != torch.float32
    if not kept or not torch.is_autocast_cache_enabled():
        return tensor.to(dtype)
    found = _cache.get(id(tensor))
    if found is None or found[0]() is not tensor:
        found = _cache[id(tensor)] = weakref.ref(tensor), tensor.to(dtype)
    return found[1]
