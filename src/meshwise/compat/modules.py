"""Read private parts of torch modules: tensor dictionaries, hooks, forward.

Tested in tests/script/test_generate.py and tests/parallel.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any, TypeVar

from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook

T = TypeVar("T")
Around = Callable[[list[Any]], contextlib.AbstractContextManager[None] | None]
"""Around a method of a model: enters what its forward enters, or gives None inside of that. The list gets the output
when the method is over."""
_AROUND = "_meshwise_around_methods"
BatchNorm = nn.modules.batchnorm._BatchNorm
"""The class of all batch norms; its forward is that of each."""


def buffers_in(module: nn.Module) -> dict[str, Tensor | None]:
    """The module's own buffers by name. Written to, it changes the module without its `__setattr__`."""
    return module._buffers


def parameters_in(module: nn.Module) -> dict[str, Tensor | None]:
    """The module's own parameters by name. Written to, it changes the module without its `__setattr__`."""
    return module._parameters  # type: ignore[return-value]


def hooked_parameters(module: nn.Module) -> list[str]:
    """The names of parameters whose gradient the program looks at or changes (`register_hook` and its like)."""
    named = module.named_parameters()
    return [name for name, p in named if p._backward_hooks or getattr(p, "_post_accumulate_grad_hooks", None)]


def renew_flat_weights(module: nn.Module) -> None:
    """Let a recurrent layer, which holds its parameters in a list too, see those that it has now."""
    if isinstance(module, nn.RNNBase):
        module._flat_weights = [getattr(module, name) for name in module._flat_weights_names]


def persistent_tensors(module: nn.Module) -> dict[str, Tensor]:
    """The module's own parameters and buffers that its `state_dict` has."""
    own: dict[str, Tensor | None] = {**module._parameters, **module._buffers}
    left_out = module._non_persistent_buffers_set
    return {name: tensor for name, tensor in own.items() if tensor is not None and name not in left_out}


def generates_together(model: nn.Module) -> None:
    """Let `generate` of transformers go on, on every rank, until all have ended: its steps gather parameters."""
    for module in model.modules():
        if hasattr(module, "generate"):
            module._is_fsdp_managed_module = True  # type: ignore[assignment]


def twin_with(module: nn.Module, name: str, child: nn.Module) -> nn.Module:
    """`module` once more, with `child` of this name in it: attributes set on one are not set on the other."""
    twin = copy.copy(module)
    twin.__dict__.update(_modules={**module._modules, name: child})
    return twin


def hooks_at_forward(module: nn.Module) -> None:
    """Let who calls `module.forward(x)` itself (SqueezeBERT's encoder) come past the module's hooks, as module(x). One
    whose forward something was put around (recompute) stays as it is."""
    if "forward" in vars(module):
        return
    entered: list[bool] = []
    module.register_forward_pre_hook(_Entered(entered), prepend=True)
    put_forward(module, functools.partial(_with_hooks, module, entered, module.forward))


class _Entered:
    """A hook that notes that the module is called."""

    def __init__(self, entered: list[bool]) -> None:
        self._entered = entered

    def __call__(self, *unused: Any) -> None:
        self._entered[:] = [True]


def _with_hooks(
    module: nn.Module, entered: list[bool], forward: Callable[..., Any], /, *args: Any, **kwargs: Any
) -> Any:
    if not entered:
        return module(*args, **kwargs)
    entered.clear()
    return forward(*args, **kwargs)


def modules_called_around(frame: FrameType | None) -> Iterator[nn.Module]:
    """The modules whose call is running around `frame`, the innermost first. Read in torch 2.13: `nn/modules`."""
    while frame is not None:
        if frame.f_code is nn.Module._call_impl.__code__:
            yield frame.f_locals["self"]
        frame = frame.f_back


@contextlib.contextmanager
def without_hooks(module: nn.Module, taken: Callable[[Any], bool]) -> Iterator[None]:
    """During the body no module in it has hooks of which `taken(hook)` is true; then they are where they were."""
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
    """Whether something runs before the module's forward: a pruned weight, an old weight norm."""
    return bool(module._forward_pre_hooks)


def around_pre_hooks(module: nn.Module, before: Callable[[], T], after: Callable[[T], None]) -> None:
    """Call `before` before the hooks that run before the module's forward, and `after` of what it gave behind them."""
    found: list[T] = []

    def begin(*unused: Any) -> None:
        found.append(before())

    def end(*unused: Any) -> None:
        after(found.pop())

    module.register_forward_pre_hook(begin, prepend=True)
    module.register_forward_pre_hook(end)


def put_forward(module: nn.Module, around: Callable[..., Any]) -> None:
    """Let the module run `around(...)` for its forward, with the signature that its own has: programs ask for it, such
    as `generate` of transformers, which gives `position_ids` to a model that takes them by name."""
    changed: Any = around
    with contextlib.suppress(ValueError, TypeError):  # TorchScript has none
        changed.__signature__ = inspect.signature(module.forward)
    module.forward = changed


def put_around_methods(module: nn.Module, around: Around) -> None:
    """Let other methods of the module's class that call parts of it (`encode`, `log_prob`) run as its forward does:
    in `around`, from the first part that they call. What is put around last is entered first."""
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
