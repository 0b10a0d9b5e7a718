"""The models and optimizers that an engine trains, under one plan, held weakly: what the program lets go is gone.

Parameters that are sharded are new objects. An optimizer that holds the old ones is re-bound when it is given to
`mw.distribute`, whether with its model or later; one that is never given is refused at its step, since it would step
without an error and change nothing.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import itertools
import os
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.weak import WeakIdKeyDictionary

from meshwise.compat.tree import map_tensors
from meshwise.parallel.apply import Applied, apply, bind, reduction_of
from meshwise.parallel.deferred import materialise
from meshwise.parallel.precision import computing
from meshwise.parallel.rebind import rebind
from meshwise.spec.errors import UsageError
from meshwise.spec.plan import Plan
from meshwise.spec.world import World
from meshwise.training.block_spans import BLOCKS, record_blocks
from meshwise.transfer import collectives


@dataclass(frozen=True)
class _Holds:
    """How many parameters an optimizer holds, whether some are the program's, those of others, whether some are old."""

    count: int
    ours: bool
    foreign: tuple[Tensor, ...]
    replaced: bool


class Program:
    """What was given to `mw.distribute`, or made by a job."""

    def __init__(self, world: World, counts: Callable[[], bool], notify: Callable[[str], None]) -> None:
        """counts: whether what this rank runs now counts, or is padding. notify: a line for the user."""
        self.world, self._counts, self._notify = world, counts, notify
        self.plan: Plan | None = None
        self.applied: Applied | None = None
        """What the plan has made of the models; None where there is nothing to do, or no model any more."""
        self.backwards = 0
        self._roots: dict[int, weakref.ref[nn.Module]] = {}
        self._modules: dict[str, weakref.ref[nn.Module]] = {}
        """Those with parameters of their own, by number of the model and name: a program may keep parts of a model."""
        self._alive = 0
        self._numbers = itertools.count()
        self._optimizers: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self._bound: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self._stepped: weakref.WeakSet[Optimizer] = weakref.WeakSet()  # since the last backward
        self._replaced = WeakIdKeyDictionary()  # parameters that the plan replaced: their names
        self._holds: weakref.WeakKeyDictionary[Optimizer, _Holds] = weakref.WeakKeyDictionary()

    @property
    def models(self) -> list[nn.Module]:
        """The models that are alive, in the order in which they were given."""
        return [model for ref in self._roots.values() if (model := ref()) is not None]

    def named_parameters(self) -> dict[str, nn.Parameter]:
        """The parameters of what is alive, each once."""
        names: dict[nn.Parameter, str] = {}
        for prefix, ref in self._modules.items():
            for name, p in module.named_parameters(recurse=False) if (module := ref()) is not None else ():
                names.setdefault(p, f"{prefix}.{name}")
        return {name: p for p, name in names.items()}

    @property
    def device(self) -> str:
        """Where the models lie."""
        first = next(iter(self.named_parameters().values()), None)
        return "cpu" if first is None else str(first.device)

    def add_models(self, models: Sequence[nn.Module], plan: Plan, *, piggyback_loss: bool = False) -> None:
        """Apply the plan to those models that are new, in place. Collective. piggyback_loss: see `parallel.apply`."""
        new = [model for model in models if not any(model is known for known in self.models)]
        if not new:
            return
        again = bool(self._roots)
        for model in new:
            self._register(model)
        before, self.plan = self.named_parameters(), plan
        if plan != Plan():
            self._apply(new, plan, again, piggyback_loss)
        for model in new:
            if any(type(p) is not nn.Parameter for p in model.parameters()):  # maybe deferred still: on one device
                materialise(model)
        now = {id(p) for p in self.named_parameters().values()}
        self._replaced.update({p: name for name, p in before.items() if id(p) not in now})
        self._holds.clear()
        for model in new:  # afterwards: what looks on must not keep the old parameters
            if os.environ.get(BLOCKS, "0") not in ("", "0"):
                record_blocks(model)
        for optimizer in list(self._optimizers):
            self.add_optimizer(optimizer)

    def forget_unused(self) -> None:
        """Forget the models that the program has let go, and their plan if none is left. Collective if there were any.

        What is garbage on one rank may wait to be collected on another, so all collect first; a model that some rank
        has let go (a best model that rank 0 alone keeps) trains nowhere.
        """
        if not self._roots:
            return
        gc.collect()
        mine = {name for name, ref in self._modules.items() if ref() is not None}
        everywhere = set.intersection(*collectives.gather_objects(mine))
        self._modules = {name: ref for name, ref in self._modules.items() if name in everywhere}
        self._roots = {n: ref for n, ref in self._roots.items() if any(name.startswith(f"{n}.") for name in everywhere)}
        self._alive = len(self._modules)
        if not everywhere:
            self.plan = None
            self._drop()

    def _register(self, model: nn.Module) -> None:
        number = next(self._numbers)
        self._roots[number] = weakref.ref(model)
        for name, module in model.named_modules():
            if next(module.parameters(recurse=False), None) is not None:
                self._modules[f"{number}.{name}"] = weakref.ref(module, self._module_is_gone)
                self._alive += 1

    def _module_is_gone(self, ref: weakref.ref[nn.Module]) -> None:
        self._alive -= 1
        if self._alive == 0:
            self._drop()

    def _drop(self) -> None:
        """Let go of the reduction of gradients, which holds parameters."""
        if self.applied is not None and self.applied.reduction is not None:
            with contextlib.suppress(ReferenceError):
                self.applied.reduction.close()
        self.applied = None

    def _apply(self, new: Sequence[nn.Module], plan: Plan, again: bool, piggyback_loss: bool) -> None:
        if again and plan.parameters_divided:
            raise UsageError(
                f"mw.distribute was called a second time with a model, under {plan}. Give all models in one call."
            )
        together = nn.ModuleList(new) if len(new) > 1 else new[0]
        world = self.world
        if world.size == 1:
            world = replace(world, device=_device_of(together, world.device))
        applied = apply(together, plan, world, counts=self._counts, piggyback_loss=piggyback_loss)
        for note in applied.notes:
            self._notify(note)
        for model in new:
            _compute_in(model, plan, world.device)
        if again and world.size > 1:
            coupled = applied.coupled_gradients or (self.applied is not None and self.applied.coupled_gradients)
            reduction = reduction_of(self.named_parameters(), plan, piggyback_loss=piggyback_loss)
            applied = replace(applied, reduction=reduction, coupled_gradients=coupled)
            self._drop()
        if plan.parameters_divided:  # the model's own hooks hold it, and it holds the model
            applied = replace(applied, reduction=weakref.proxy(applied.reduction))
        self.applied = replace(applied, model=nn.Module())

    def add_optimizer(self, optimizer: Optimizer) -> None:
        """Give `optimizer` what the plan has made of the parameters that it holds."""
        self._optimizers.add(optimizer)
        if optimizer in self._bound:
            return
        now = self.named_parameters()
        names = {id(p): name for name, p in now.items()}
        held = _parameters_of(optimizer)
        old = {id(p): self._replaced[p] for p in held if p in self._replaced}
        if not old and not any(id(p) in names for p in held):
            return  # its model may come later
        if old:
            rebind(optimizer, names | old, now)
        if self.applied is not None:
            bind(self.applied, optimizer, self.world)
            self._bound.add(optimizer)
        self._holds.pop(optimizer, None)

    def close(self) -> None:
        """Forget everything."""
        self._roots, self._modules, self._alive = {}, {}, 0
        self._drop()

    def check_has_models(self) -> None:
        """Raises UsageError where several ranks run a backward that nothing reduces."""
        if self.world.size > 1 and (self.plan is None or not self._alive):
            gone = "is not referenced any more" if self._roots else "was never given"
            raise UsageError(
                f"mw.backward: the model {gone}, so gradients would be of one rank alone. Give the model that is "
                "trained to mw.distribute, and keep it."
            )

    def begin_backward(self) -> None:
        """Gradients are about to be made, and reduced over the ranks."""
        self.backwards += 1
        self._stepped.clear()

    def check_step(self, optimizer: Optimizer, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        """Raises UsageError for a step with the gradients of one rank alone, or with parameters that were replaced:
        the ranks would silently diverge. Gradients that wait to be reduced are reduced."""
        reduction = self.applied.reduction if self.applied is not None else None
        if reduction is not None or self._replaced:
            ours = self._check_held(optimizer, self.holds(optimizer))
            if ours and reduction is not None:
                unmade = self.backwards == 0 or optimizer in self._stepped
                if unmade and any(p.grad is not None for p in _parameters_of(optimizer)):
                    raise UsageError(
                        "optimizer.step() found gradients that mw.backward did not make, so each rank has its own. "
                        "Write mw.backward(loss) instead of loss.backward()."
                    )
                if reduction.unreduced:
                    reduction.reduce_now()
        self._stepped.add(optimizer)

    def holds(self, optimizer: Optimizer) -> _Holds:
        """What the optimizer holds: looked up again only when it has more parameters, or the program more models."""
        count = sum(len(group["params"]) for group in optimizer.param_groups)
        known = self._holds.get(optimizer)
        if known is None or known.count != count:
            held, ours = _parameters_of(optimizer), {id(p) for p in self.named_parameters().values()}
            foreign = tuple(p for p in held if id(p) not in ours)
            replaced = any(p in self._replaced for p in held)
            known = self._holds[optimizer] = _Holds(count, len(foreign) < count, foreign, replaced)
        return known

    def trains(self, optimizer: Optimizer) -> bool:
        """Whether the optimizer was given, or holds parameters of the models."""
        return optimizer in self._optimizers or self.holds(optimizer).ours

    def _check_held(self, optimizer: Optimizer, holds: _Holds) -> bool:
        if holds.replaced:
            raise UsageError(
                "optimizer.step(): this optimizer was made before mw.distribute and not given to it, so it holds the "
                "parameters that the model had before they were sharded, and would change nothing. Give it to "
                "mw.distribute with the model, or make it afterwards."
            )
        if not holds.ours:
            if optimizer in self._optimizers:
                raise UsageError(
                    "optimizer.step(): this optimizer was given to mw.distribute, and holds no parameter of a model "
                    "that was. Give the model that it trains to mw.distribute too."
                )
            return False
        for p in holds.foreign:
            if p.grad is not None:
                raise UsageError(
                    f"optimizer.step(): the optimizer holds a parameter of shape {tuple(p.shape)} that belongs to no "
                    "distributed model, so its gradient is of one rank alone. Give the module that it is of to "
                    "mw.distribute too."
                )
        plan = self.plan
        if plan and plan.state_divided and not plan.parameters_divided and optimizer not in self._bound:
            self._notify("zero1: an optimizer that was not given to mw.distribute keeps its whole state on every rank.")
        return True


def _parameters_of(optimizer: Optimizer) -> list[nn.Parameter]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def _device_of(model: nn.Module, otherwise: str) -> str:
    first = next(model.parameters(), None)
    return otherwise if first is None else str(first.device)


def _compute_in(model: nn.Module, plan: Plan, device: str) -> None:
    """Let the model's own forward be computed in the plan's dtypes, and give float32 back, as the loss needs it."""
    if plan.dtypes.computed != plan.dtypes.stored:
        changed: Any = model
        changed.forward = functools.partial(_computed, model.forward, plan, device)


def _computed(forward: Callable[..., Any], plan: Plan, device: str, /, *arguments: Any, **keywords: Any) -> Any:
    with computing(device, plan.dtypes):
        result = forward(*arguments, **keywords)
    return map_tensors(_widened, result)


def _widened(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.dtype in (torch.bfloat16, torch.float16) else tensor
