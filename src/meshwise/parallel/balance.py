"""Compute a mixture of experts' balance loss over the global batch.

The loss then equals the loss on one device.

Such a loss is a product of two means over tokens (Switch Transformer, arXiv:2101.03961), so the mean over ranks of each
rank's loss is another number. Models of transformers call a module-level function for it; during their forward, that
function gets the router outputs of all ranks, and gradients go back to the ranks that computed them.

A router with an expert capacity counts one rank's tokens, but on one device the whole batch. A note tells the user.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import Function, FunctionCtx
from torch.nn import functional

from meshwise.parallel.splits.crossing import gather, through
from meshwise.parallel.technique import Samples, Setup, Technique
from meshwise.spec.words import some
from meshwise.torch_compat.modules import put_forward
from meshwise.transfer import collectives

NAME = "load_balancing_loss_func"
_running: list[Samples] = []
"""For each distributed model whose forward runs now, a function that returns the number of this rank's samples."""


def _apply(setup: Setup) -> None:
    samples = setup.samples
    if setup.world.size == 1 or samples is None:
        return
    drops = [name for name, module in setup.model.named_modules() if _counts_tokens(type(module))]
    if drops and setup.plan.devices > setup.plan.within_samples:
        setup.notes.append(
            f"{some(drops)}: the router drops tokens above an expert's capacity, and counts only the tokens of one "
            "rank. If tokens are dropped, the training differs slightly from one device. Set a capacity that no expert "
            "exceeds."
        )
    for name, module in setup.model.named_modules():
        function = _balance_of(module)
        if function is None:
            continue
        if "gate_logits" not in inspect.signature(function).parameters:
            setup.notes.append(
                f"{name or type(module).__name__} computes its balance loss from the samples of each rank separately. "
                "This loss is not a mean over samples, so the training differs slightly from one device."
            )
            continue
        _install(type(module).__module__)
        put_forward(module, functools.partial(_forward, module.forward, samples))
        setup.coupled_gradients = True


def _balance_of(module: nn.Module) -> Callable[..., Any] | None:
    """Return the function that a module's forward calls to compute the balance loss, or None if there is none."""
    code = getattr(inspect.unwrap(type(module).forward), "__code__", None)
    if code is None or NAME not in code.co_names:
        return None
    return getattr(sys.modules.get(type(module).__module__), NAME, None)


def _counts_tokens(kind: type) -> bool:
    """Return whether a router drops tokens above a capacity, and counts the tokens of all samples together."""
    codes = [function.__code__ for function in vars(kind).values() if inspect.isfunction(function)]
    return any(
        "cumsum" in code.co_names
        and any("capacity" in name for name in (*code.co_names, *code.co_varnames))
        and -2 not in code.co_consts
        for code in codes
    )


@functools.cache
def _install(module: str) -> None:
    original = getattr(sys.modules[module], NAME)
    setattr(sys.modules[module], NAME, functools.wraps(original)(functools.partial(_balance, original)))


def _forward(forward: Callable[..., Any], samples: Samples, /, *given: Any, **named: Any) -> Any:
    _running.append(samples)
    try:
        return forward(*given, **named)
    finally:
        _running.pop()


def _balance(original: Callable[..., Any], /, *given: Any, **named: Any) -> Any:
    """Compute a mixture of experts' balance loss from the router outputs of all ranks, as for the global batch on one
    device."""
    samples = _running[-1]() if _running else None
    bound = inspect.signature(original).bind(*given, **named)
    layers, mask = bound.arguments["gate_logits"], bound.arguments.get("attention_mask")
    if samples is None or not isinstance(layers, tuple) or not layers:
        return original(*given, **named)
    found = [gather(layer).flatten(0, -2) for layer in layers]
    columns = found if mask is None else [*found, gather(mask).reshape(-1, 1).to(found[0])]
    rows = of_all_ranks(torch.cat([each.to(columns[0].device) for each in columns], 1), samples > 0)
    parts = rows.split([each.shape[1] for each in columns], 1)
    bound.arguments["gate_logits"] = tuple(parts[: len(layers)])
    if mask is not None:
        bound.arguments["attention_mask"] = parts[-1].detach()
    return original(*bound.args, **bound.kwargs)


def of_all_ranks(rows: Tensor, counts: bool) -> Tensor:
    """Gather the rows of the ranks that pass True for `counts`, in rank order."""
    own = rows if counts else rows[:0]
    lengths = collectives.all_gather(torch.tensor([len(own)], device=rows.device), of="the balance loss").flatten()
    return through(_Rows, own, tuple(lengths.tolist()))


class _Rows(Function):
    @staticmethod
    def forward(ctx: FunctionCtx, own: Tensor, lengths: tuple[int, ...]) -> Tensor:
        ctx.lengths = lengths  # type: ignore[attr-defined]
        padded = functional.pad(own, (0, 0, 0, max(lengths) - len(own)))
        every = collectives.all_gather(padded.contiguous(), of="the balance loss")
        return torch.cat([part[:length] for part, length in zip(every, lengths, strict=True)])

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        total = collectives.all_reduce(gradient.clone(), of="the balance loss")
        return total.split(ctx.lengths)[collectives.get_rank()], None


BALANCE = Technique(apply=_apply)
