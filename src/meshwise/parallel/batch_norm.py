"""Compute batch-norm statistics over the global microbatch.

The statistics cover the samples of all ranks, as on one device.

Layers keep their own forward. While it runs, `torch.nn.functional.batch_norm` uses the statistics of all ranks. So a
subclass keeps what it adds (such as an activation), and modules that call the function themselves are right too. The
means and squared deviations of all ranks are gathered in one collective and combined by the parallel formula of Chan,
Golub and LeVeque (1979), which avoids cancellation. The backward sums two numbers per channel over the ranks. torch's
SyncBatchNorm has no CPU implementation.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
from collections.abc import Callable, Iterator
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from meshwise.parallel.splits.tensor import SplitTensor, split
from meshwise.parallel.technique import Samples, Setup, Technique
from meshwise.spec.errors import PlanError
from meshwise.torch_compat.dispatch import rehearsing
from meshwise.torch_compat.modules import BatchNorm
from meshwise.torch_compat.reducer import base_of, version
from meshwise.torch_compat.torch_function import on_parts
from meshwise.transfer import collectives

BY_HAND: tuple[Any, ...] = (functional.batch_norm, torch.batch_norm)
_AS_TORCH = ("input", "weight", "bias", "running_mean", "running_var", "training", "momentum", "eps")


def join_batch_norms(model: nn.Module, samples: Samples = lambda: None) -> list[str]:
    """Make the batch norms of `model` use the statistics of all ranks. Return their names."""
    joined = []
    found: list[tuple[str, Any]] = [(name, m) for name, m in model.named_modules() if normalises(m)]
    for name, module in found:
        if isinstance(module, torch.jit.ScriptModule):
            raise PlanError(
                f"batch norm {name or type(module).__name__} is TorchScript, which meshwise cannot change, so it would "
                "use one rank's statistics. Distribute the model before torch.jit.script, or use one device."
            )
        if not is_joined(module):
            whole = type(module).forward is nn.SyncBatchNorm.forward
            own = functools.partial(BatchNorm.forward, module) if whole else module.forward
            module.forward = _JoinedForward(_forward, module, own, samples, name)
            joined.append(name)
    return joined


class _JoinedForward(functools.partial[Any]):
    """A batch norm's forward over all ranks. A copy of the module by `copy.deepcopy` also uses this forward. A pickled
    module is saved with its original forward."""

    def __deepcopy__(self, memo: dict[int, Any]) -> _JoinedForward:
        return _JoinedForward(self.func, *copy.deepcopy(self.args, memo))

    def __reduce__(self) -> Any:
        _, own, *_ = self.args
        return functools.partial, (own,)


@contextlib.contextmanager
def unjoined(model: nn.Module) -> Iterator[None]:
    """Restore the original forwards of batch norms in the with-body, so that the model can be saved to a file."""
    joined = [(module, vars(module)["forward"]) for module in model.modules() if is_joined(module)]
    for module, forward in joined:
        _, own, *_ = forward.args
        module.forward = own
        if getattr(own, "__func__", None) is type(module).forward:
            del module.forward
    try:
        yield
    finally:
        for module, forward in joined:
            module.forward = forward


def is_joined(module: nn.Module) -> bool:
    """Return whether `module` is a batch norm that uses the statistics of all ranks."""
    return getattr(getattr(module, "forward", None), "func", None) is _forward


def normalises(module: nn.Module) -> bool:
    """Return whether `module` is a batch norm, or has a function that calls `torch.nn.functional.batch_norm`."""
    if isinstance(module, torch.jit.ScriptModule):
        return "BatchNorm" in str(module.original_name)
    kind: Any = type(module)
    held = (value.func if isinstance(value, functools.partial) else value for value in vars(module).values())
    return isinstance(module, BatchNorm) or any(map(_is_by_hand, held)) or _calls(kind)


def _is_by_hand(value: Any) -> bool:
    return any(value is function for function in BY_HAND)


@functools.cache
def _calls(kind: type[nn.Module]) -> bool:
    seen: set[FunctionType] = set()
    classes = [c for c in kind.__mro__ if not c.__module__.startswith("torch.") and c is not object]
    return any(_mentions(inspect.unwrap(f), seen) for c in classes for f in vars(c).values() if inspect.isfunction(f))


def _mentions(function: Any, seen: set[FunctionType]) -> bool:
    """Return whether a function refers to torch's batch norm, directly or through a function of the same file that it
    calls."""
    if not isinstance(function, FunctionType) or function in seen or function.__module__.startswith("torch."):
        return False
    seen.add(function)
    codes, names = [function.__code__], set[str]()
    while codes:
        code = codes.pop()
        names |= set(code.co_names)
        codes += [constant for constant in code.co_consts if inspect.iscode(constant)]
    called = [function.__globals__[name] for name in names if name in function.__globals__]
    return "batch_norm" in names or any(_is_by_hand(f) or _mentions(f, seen) for f in called)


def _forward(module: Any, own: Callable[..., Any], samples: Samples, name: str, /, *given: Any, **named: Any) -> Any:
    running = getattr(module, "running_mean", None)
    if isinstance(module, BatchNorm) and not module.training and running is not None:
        return own(*given, **named)
    before, joined = None if running is None else version(running), _Joined(samples)
    with joined:
        result = own(*given, **named)
    written = running is not None and (module.running_mean is not running or version(running) != before)
    if isinstance(module, BatchNorm) and written and not joined.calls:
        raise PlanError(
            f"batch norm {name or 'of the model'} is a {type(module).__name__}. This class computes its statistics "
            "itself, and would use only one rank's samples. Call super().forward or torch.nn.functional.batch_norm in "
            "its forward, or use one device."
        )
    return result


class _Joined(TorchFunctionMode):
    """A context manager in which torch's batch norm uses the statistics of all ranks."""

    def __init__(self, samples: Samples) -> None:
        super().__init__()
        self._samples, self.calls = samples, 0

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not _is_by_hand(function):
            return function(*args, **kwargs)
        self.calls += 1
        if function is torch.batch_norm:
            kwargs = {**dict(zip(_AS_TORCH, args, strict=False)), **{n: v for n, v in kwargs.items() if n in _AS_TORCH}}
            args = ()
        x = kwargs["input"] if "input" in kwargs else args[0]
        if not isinstance(x, SplitTensor) or x.part.axis.name != "data":
            return batch_norm(self._samples, *args, **kwargs)
        if x.part.axis.proves:
            with on_parts():
                return split(batch_norm(self._samples, *args, **kwargs), x.part)
        with x.part.axis.unheard():
            return functional.batch_norm(x, *args[1:], **{n: v for n, v in kwargs.items() if n != "input"})


def batch_norm(
    samples: Samples,
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    **rates: float,
) -> Tensor:
    """Compute `torch.nn.functional.batch_norm` with the statistics of all ranks."""
    if not training or isinstance(base_of(input), nn.Parameter):
        return functional.batch_norm(input, running_mean, running_var, weight, bias, training, **rates)
    result: Tensor
    working_on = samples()
    result, mean, variance, count = _Normalize.apply(input, weight, bias, rates.get("eps", 1e-5), working_on)  # type: ignore[no-untyped-call]
    if running_mean is not None and running_var is not None:
        _track((running_mean, running_var), mean, variance, count, rates.get("momentum", 0.1))
    return result


@torch.no_grad()
def _track(running: tuple[Tensor, Tensor], mean: Tensor, variance: Tensor, count: Tensor, momentum: float) -> None:
    """Update the running mean and variance with `momentum`, as torch does."""
    for tracked, value in zip(running, (mean, variance * (count / (count - 1))), strict=True):
        tracked.add_(((value - tracked) * momentum).to(tracked.dtype))


class _Normalize(torch.autograd.Function):
    """Normalizes x of shape (samples, channels, ...) per channel over all ranks, then multiplies by weight and adds
    bias."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, samples: int | None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        over = [dim for dim in range(x.ndim) if dim != 1]
        number, counts = wide.numel() // wide.shape[1], samples != 0
        own = wide.mean(over)
        deviations = (wide - _along(own, wide)).square().sum(over)
        of_slice = samples is not None and len(x) == max(samples, 1)
        facts = torch.tensor([float(number), float(number * counts), float(of_slice)]).to(own)
        means, squares, rest = collectives.all_gather(torch.cat([own, deviations, facts]), of="batch norm").split(
            [len(own), len(own), 3], dim=1
        )
        numbers = rest[:, 1:2]
        total = numbers.sum()
        mean = (means * numbers).sum(0) / total
        variance = (squares * (numbers > 0) + (means - mean).square() * numbers).sum(0) / total
        same = torch.cat([means, squares, rest[:, :1]], 1)
        shared = (same == same[0]).all() & ~rest[:, 2].any()
        scale = (variance + eps).rsqrt()
        ctx.save_for_backward(x, weight, mean, scale, total)
        ctx.counts, ctx.with_bias = counts, bias is not None
        result = (wide - _along(mean, wide)) * _along(scale if weight is None else scale * weight, wide)
        if bias is not None:
            result = result + _along(bias, wide)
        over_all = torch.where(shared, rest[0, 0], total)
        if number == 1 and not rehearsing() and int(over_all) == 1:  # the error that torch raises on one device
            raise ValueError(f"Expected more than 1 value per channel when training, got input size {x.size()}")
        ctx.mark_non_differentiable(mean, variance, over_all)
        return result.to(x.dtype), mean, variance, over_all

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, mean, scale, total = ctx.saved_tensors
        gradient = gradients[0].to(mean.dtype)
        over = [dim for dim in range(x.ndim) if dim != 1]
        unit = (x.to(mean.dtype) - _along(mean, x)) * _along(scale, x)
        sums = torch.stack([gradient.sum(over), (gradient * unit).sum(over)])
        of_bias, of_weight = sums.clone().unbind()
        if not ctx.counts:
            sums.zero_()
        plain, along = (collectives.all_reduce(sums, of="batch norm") / total).unbind()
        if ctx.counts:
            gradient = gradient - _along(plain, x) - unit * _along(along, x)
        result = gradient * _along(scale if weight is None else scale * weight, x)
        return (
            result.to(x.dtype),
            None if weight is None else of_weight.to(weight.dtype),
            of_bias if ctx.with_bias else None,
            None,
            None,
        )


def _apply(setup: Setup) -> None:
    model, plan, several = setup.model, setup.plan, setup.world.size > 1
    if not any(normalises(module) for module in model.modules()):
        return
    if setup.samples is not None and several and plan.batch_norm == "global":
        join_batch_norms(model, setup.samples)
        setup.coupled_gradients = any(map(is_joined, model.modules()))
    if several and not setup.coupled_gradients:
        setup.notes.append(
            "batch norm: each rank uses the statistics of its own slice of the batch, so the numbers are not "
            "those of one device."
        )
    if plan.accumulate > 1:
        setup.notes.append(
            f"batch norm: accumulate={plan.accumulate} uses the statistics of each microbatch, so the numbers differ "
            "from accumulate=1 (they do not depend on the number of devices)."
        )


BATCH_NORM = Technique(apply=_apply)


def _along(channels: Tensor, like: Tensor) -> Tensor:
    """Reshape one number per channel so that it broadcasts with a tensor of shape (samples, channels, ...)."""
    return channels.view(1, -1, *[1] * (like.ndim - 2))
