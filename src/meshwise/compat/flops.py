"""Count an operator's FLOPs by the formulas of torch's flop counter.

Operators without a formula count none: they are bound by memory. A causal attention counts half, as its fused kernels
compute half. Read in torch 2.11, 2.13 and 2.15: `utils/flop_counter.py`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch

_ALIKE = {
    "_scaled_dot_product_flash_attention_for_cpu": "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_flash_attention_for_cpu_backward": "_scaled_dot_product_flash_attention_backward",
}


def flops_of(operator: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], out: Any) -> int:
    """Return the number of multiplications and additions in a call of `operator` that returned `out`. Return 0 if torch
    has no formula for the operator."""
    formula = _formulas().get(operator.overloadpacket)
    if formula is None:
        return 0
    count = int(formula(*args, **kwargs, out_val=out))
    return count // 2 if _is_causal(operator, args, kwargs) else count


def _is_causal(operator: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    names = [argument.name for argument in operator._schema.arguments]
    if "is_causal" not in names:
        return False
    at = names.index("is_causal")
    return bool(kwargs.get("is_causal", args[at] if at < len(args) else False))


@functools.cache
def _formulas() -> dict[Any, Callable[..., int]]:
    from torch.utils.flop_counter import flop_registry

    found = dict(flop_registry)
    for name, like in _ALIKE.items():
        packet = getattr(torch.ops.aten, name, None)
        formula = found.get(getattr(torch.ops.aten, like))
        if packet is not None and formula is not None:
            found.setdefault(packet, functools.partial(_of_cpu, formula) if name.endswith("backward") else formula)
    return found


def _of_cpu(formula: Callable[..., int], *args: Any, out_val: Any = None, **kwargs: Any) -> int:
    """Count the FLOPs of a backward of CPU attention. formula: torch's formula for the GPU kernel. It uses only
    arguments that the CPU kernel has too."""
    return formula(*args, out_val=out_val)
