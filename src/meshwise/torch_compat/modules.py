"""Reach private parts of modules and optimizers: tensors, hooks, forward, dtype.

torch's `model.to(torch.float64)` drops the imaginary parts of complex numbers; `store_model` keeps them. Based on torch
2.11, 2.13 and 2.15: `nn/modules/module.py`, `to`.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim import Optimizer

T = TypeVar("T")
Around = Callable[[list[Any]], contextlib.AbstractContextManager[None] | None]
"""A function that returns a context manager for a call of a module's method, such as `encode`, or None if such a
context is active. Its argument is an empty list, to which the caller then appends the method's output."""
_AROUND = "_meshwise_around_methods"
BatchNorm = nn.modules.batchnorm._BatchNorm
"""The base class of all batch norms, which inherit its forward."""


def buffers_in(module: nn.Module) -> dict[str, Tensor | None]:
    """Return the dict of the module's buffers by name, without those of submodules. Writing to the dict changes the
    module without its `__setattr__`."""
    return module._buffers


def parameters_in(module: nn.Module) -> dict[str, Tensor | None]:
    """Return the dict of the module's parameters by name, without those of submodules. Writing to the dict changes the
    module without its `__setattr__`."""
    return module._parameters  # type: ignore[return-value]


def hooked_parameters(module: nn.Module) -> list[str]:
    """Return the names of the parameters whose gradients have hooks (`register_hook` or
    `register_post_accumulate_grad_hook`)."""
    return [name for name, p in module.named_parameters() if any(gradient_hooks(p))]


def gradient_hooks(parameter: Tensor) -> list[dict[int, Any]]:
    """Return two dicts of a parameter's hooks: those that may change its gradient, and those that are called once the
    gradient is in `.grad`. Changing a dict changes the hooks. If a parameter has none, the dict is new and empty."""
    held = parameter._backward_hooks, getattr(parameter, "_post_accumulate_grad_hooks", None)
    return [{} if each is None else each for each in held]


def renew_flat_weights(module: nn.Module) -> None:
    """Update the list of parameters that a recurrent layer keeps (`_flat_weights`), after its parameters were
    replaced."""
    if isinstance(module, nn.RNNBase):
        module._flat_weights = [getattr(module, name) for name in module._flat_weights_names]


def persistent_tensors(module: nn.Module) -> dict[str, Tensor]:
    """Return a dict of the module's own parameters and persistent buffers by name. These are the tensors in its
    `state_dict`, without those of submodules."""
    own: dict[str, Tensor | None] = {**module._parameters, **module._buffers}
    left_out = module._non_persistent_buffers_set
    return {name: tensor for name, tensor in own.items() if tensor is not None and name not in left_out}


def generates_together(model: nn.Module) -> None:
    """Make the method `generate` of a transformers model continue on every rank until all ranks have finished. Each of
    its steps gathers parameters from all ranks, so no rank may stop earlier."""
    for module in model.modules():
        if hasattr(module, "generate"):
            module._is_fsdp_managed_module = True  # type: ignore[assignment]


def twin_with(module: nn.Module, name: str, child: nn.Module) -> nn.Module:
    """Return a shallow copy of `module` whose submodule `name` is `child`. Attributes that are set later on one of the
    two modules do not appear on the other."""
    twin = copy.copy(module)
    twin.__dict__.update(_modules={**module._modules, name: child})
    return twin


def hooks_at_forward(module: nn.Module) -> None:
    """Make `module.forward(x)` run the module's hooks, as `module(x)` does. Some models call `forward` directly, such
    as the encoder of SqueezeBERT. A module whose forward is wrapped already, for example for activation recomputation,
    is not changed."""
    if "forward" in vars(module):
        return
    entered: list[bool] = []
    module.register_forward_pre_hook(functools.partial(_entered, entered), prepend=True)
    put_forward(module, functools.partial(_with_hooks, module, entered, module.forward))


def _entered(entered: list[bool], *unused: Any) -> None:
    """Record that the module was called: this hook runs for `module(x)`, but not for `module.forward(x)`."""
    entered[:] = [True]


def _with_hooks(
    module: nn.Module, entered: list[bool], forward: Callable[..., Any], /, *args: Any, **kwargs: Any
) -> Any:
    if not entered:
        return module(*args, **kwargs)
    entered.clear()
    return forward(*args, **kwargs)


@contextlib.contextmanager
def without_hooks(module: nn.Module, taken: Callable[[Any], bool]) -> Iterator[None]:
    """In the block, remove the hooks for which `taken(hook)` is true from the module and its submodules."""
    before: list[tuple[dict[int, Any], dict[int, Any]]] = []
    for each in module.modules():
        every = [value for name, value in vars(each).items() if "_hooks" in name and isinstance(value, dict)]
        ours = {key for hooks in every for key, hook in hooks.items() if taken(getattr(hook, "hook", hook))}
        for hooks in every if ours else []:
            before.append((hooks, dict(hooks)))
            for key in ours & hooks.keys():
                del hooks[key]
    try:
        yield
    finally:
        for hooks, were in before:
            hooks.clear()
            hooks.update(were)


def has_pre_hooks(module: nn.Module) -> bool:
    """Return whether the module has forward pre-hooks, such as those of pruning or the old weight norm."""
    return bool(module._forward_pre_hooks)


def around_pre_hooks(module: nn.Module, before: Callable[[], T], after: Callable[[T], None]) -> None:
    """Call `before()` before the module's forward pre-hooks run, and `after(result)` after they have run, where
    `result` is what `before()` returned."""
    found: list[T] = []
    module.register_forward_pre_hook(lambda *_: found.append(before()), prepend=True)
    module.register_forward_pre_hook(lambda *_: after(found.pop()))


def put_forward(module: nn.Module, around: Callable[..., Any]) -> None:
    """Replace the module's forward by `around`, and give `around` the signature of the replaced forward. Some programs
    read it: `generate` of transformers passes `position_ids` only to a forward with such an argument."""
    changed: Any = around
    with contextlib.suppress(ValueError, TypeError):  # TorchScript has no signature
        changed.__signature__ = inspect.signature(module.forward)
    module.forward = changed


def put_around_methods(module: nn.Module, around: Around) -> None:
    """Let each public method of the module, such as `encode` or `log_prob`, run inside the context manager that
    `around` returns. The forward and methods that torch defines are left unchanged.

    The context is entered only when the method calls a submodule that has parameters. If this function is called again
    for the same module, the contexts are nested, and the newest `around` is the outermost."""
    if _AROUND in vars(module):
        vars(module)[_AROUND].insert(0, around)
        return
    vars(module)[_AROUND] = arounds = [around]
    kinds = [kind for kind in type(module).__mro__ if not kind.__module__.startswith(("torch.", "builtins"))]
    for name in dict.fromkeys(name for kind in kinds for name in vars(kind)):
        own = inspect.getattr_static(type(module), name)
        if inspect.isfunction(own) and name[0] != "_" and name not in vars(module) and not hasattr(nn.Module, name):
            method: Any = functools.partial(_in_method, module, arounds, getattr(module, name))
            vars(module)[name] = functools.update_wrapper(method, own)


def _in_method(
    module: nn.Module, arounds: list[Around], method: Callable[..., Any], /, *args: Any, **kwargs: Any
) -> Any:
    output: list[Any] = []
    entered = arounds[0](output)
    if entered is None:
        return method(*args, **kwargs)
    with contextlib.ExitStack() as stack:

        def enter(part: nn.Module, inputs: Any) -> None:
            if part is not module and next(part.parameters(), None) is not None and part in parts:
                hook.remove()
                for each in [entered, *(around(output) for around in arounds[1:])]:
                    stack.enter_context(each or contextlib.nullcontext())

        parts = set(module.modules())
        hook = register_module_forward_pre_hook(enter)
        stack.callback(hook.remove)
        output.append(method(*args, **kwargs))
    return output[0]


def move_hook(hook: Any, *, last: bool) -> None:
    """Make the optimizer call this hook after, or before, all others of the same kind."""
    hook.hooks_dict_ref().move_to_end(hook.id, last)


def step_without_hooks(optimizer: Optimizer) -> Callable[[Optimizer], Any]:
    """Return the `step` function of the optimizer's class without the wrapper in which torch calls hooks."""
    step: Any = type(optimizer).step
    unhooked: Callable[[Optimizer], Any] = getattr(step, "__wrapped__", step)
    return unhooked


def after_method(optimizer: Optimizer, name: str, then: Callable[[], None]) -> None:
    """Call `then()` after each call of the optimizer's method `name`, if the optimizer has such a method."""
    method = getattr(optimizer, name, None)
    if not callable(method):
        return

    @functools.wraps(method)
    def called(*args: Any, **kwargs: Any) -> Any:
        result = method(*args, **kwargs)
        then()
        return result

    setattr(optimizer, name, called)


def is_hooks(name: str) -> bool:
    """Return whether `name` is an attribute of optimizers that holds hooks."""
    return name.startswith("_optimizer_") and name.endswith("_hooks")


def takes_hooks(optimizer: Optimizer) -> bool:
    """Return whether hooks can be added to the optimizer. This is impossible for some wrappers of optimizers, whose
    classes do not call `Optimizer.__init__`."""
    return hasattr(optimizer, "_optimizer_step_pre_hooks")


WIDE = {
    torch.float32: torch.float64,
    torch.float16: torch.float64,
    torch.bfloat16: torch.float64,
    torch.complex64: torch.complex128,
    torch.complex32: torch.complex128,
}
"""For each narrow floating or complex dtype, the wider dtype that `meshwise check` uses instead."""


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
