"""Hold weak references to the models and optimizers of an engine.

Sharded parameters are new objects. An optimizer with the old parameters gets the new ones when it is passed to
`mw.distribute`, even later than its model. If it is never passed, its step raises an error: it would change nothing.
"""

from __future__ import annotations

import gc
import itertools
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.weak import WeakIdKeyDictionary

from meshwise import parallel
from meshwise.parallel.apply import apply, bind
from meshwise.parallel.step_hooks import held_parameters, is_by_numbers
from meshwise.parallel.technique import Cost, Reduction, Samples
from meshwise.spec.errors import UsageError
from meshwise.spec.plan import Plan
from meshwise.spec.world import World
from meshwise.torch_compat import program_calls
from meshwise.torch_compat.tree import map_tensors
from meshwise.transfer import collectives

NOT_OURS = (
    "optimizer.step() found gradients that mw.backward did not make since the last step: they were used already, or "
    "cover only this rank. Write mw.backward(loss) instead of loss.backward() before each step."
)


@dataclass(frozen=True)
class _Holds:
    """The parameters that an optimizer holds."""

    count: int
    ours: bool
    foreign: tuple[Tensor, ...]
    replaced: bool
    new: bool = True


class Program:
    """The models and optimizers that were given to `mw.distribute` or made by a job."""

    def __init__(self, world: World, samples: Samples, notify: Callable[[str], None], *, piggyback_loss: bool) -> None:
        """samples: returns how many samples this rank has in the current batch, or None."""
        self.world, self._samples, self._notify, self._piggyback_loss = world, samples, notify, piggyback_loss
        self.plan: Plan | None = None
        self.reduction: Reduction | None = None
        """Averages gradients over the ranks; None if no averaging is needed, or if no model is left."""
        self._plain: Callable[[Tensor], Tensor] | None = None  # `Reduction.plain`, for a program without a reduction
        self.joined_at: int | None = None
        """The value of `backwards` at the last `mw.sum` or `mw.mean` with grad=True; None without such a call."""
        self.coupled_gradients = False
        """Whether ranks exchange gradients in the backward, so that they depend on other ranks' losses."""
        self.pipeline: parallel.pipeline.Pipeline | None = None
        """Runs the stages of this rank, if the plan has a pipeline; otherwise None."""
        self.stage_cost: Cost | None = None  # see `Job.stage_cost`
        self.backwards = self.began = 0
        """The number of backwards in this session or job. `began` is its value when the current program began."""
        self.by_construction = False
        """Whether each backward of the program averages gradients, so that its steps need not be checked."""
        self._older: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self._roots: dict[int, weakref.ref[nn.Module]] = {}
        self._modules: dict[str, weakref.ref[nn.Module]] = {}
        """Modules that directly hold parameters, by model number and name. They may outlive the model."""
        self._alive = 0
        self._numbers = itertools.count()
        self.optimizers: weakref.WeakKeyDictionary[Optimizer, bool] = weakref.WeakKeyDictionary()
        """Optimizers that were passed to `mw.distribute` (True), or that have stepped, in the same order on all
        ranks."""
        self._bound: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self._stepped: list[weakref.ref[Optimizer]] = []  # optimizers that stepped since the last backward
        self.in_use: list[weakref.ref[Optimizer]] = []
        """The optimizers that stepped between the last two backwards. The ranks compare their settings."""
        self.may_draw = False
        """Whether any optimizer may draw random numbers in its step. The optimizers of torch draw none."""
        self._replaced = WeakIdKeyDictionary()  # the names of parameters that the plan has replaced
        self._holds: dict[weakref.ref[Optimizer], _Holds] = {}

    @property
    def models(self) -> list[nn.Module]:
        """The models that still exist, in the order in which they were added."""
        return list(self.numbered_models().values())

    def numbered_models(self) -> dict[str, nn.Module]:
        """Return the models that still exist, in a dict by number."""
        return {str(number): model for number, ref in self._roots.items() if (model := ref()) is not None}

    def named_parameters(self) -> dict[str, nn.Parameter]:
        """Return the parameters of all modules that still exist, by name. A shared parameter appears once."""
        names: dict[nn.Parameter, str] = {}
        for prefix, ref in self._modules.items():
            for name, p in module.named_parameters(recurse=False) if (module := ref()) is not None else ():
                names.setdefault(p, f"{prefix}.{name}")
        return {name: p for p, name in names.items()}

    @property
    def device(self) -> str:
        """The device of the models' parameters; "cpu" if there are no parameters."""
        first = next(iter(self.named_parameters().values()), None)
        return "cpu" if first is None else str(first.device)

    def begins_with(self, models: Sequence[nn.Module]) -> bool:
        """Return whether a new training program begins with these models, and record its beginning."""
        new = any(all(model is not known for known in self.models) for model in models)
        begins = new and self.backwards > self.began
        if begins:
            self.began, self._older = self.backwards, weakref.WeakSet(self.optimizers)
        return begins

    def add_models(self, models: Sequence[nn.Module], plan: Plan) -> None:
        """Apply the plan in place to the `models` that this method has not seen before. Collective."""
        new = [model for model in models if not any(model is known for known in self.models)]
        if not new:
            return
        for model in new:
            if self.world.size > 1 and isinstance(model, nn.parallel.DistributedDataParallel | nn.DataParallel):
                raise UsageError(
                    f"mw.distribute was given a {type(model).__name__}. Remove that wrapper: mw.distribute takes the "
                    "model itself, and averages its gradients."
                )
        again = bool(self._roots)
        for model in new:
            self._register(model)
        before, self.plan = self.named_parameters(), plan
        if plan != Plan():
            self._apply(new, plan, again)
        for model in new:
            if any(type(p) is not nn.Parameter for p in model.parameters()):  # still deferred if no plan was applied
                parallel.deferred.materialise(model)
            if plan == Plan() and self.world.given and all(p.device.type == "cpu" for p in model.parameters()):
                model.to(self.world.device)
        now = {id(p) for p in self.named_parameters().values()}
        self._replaced.update({p: name for name, p in before.items() if id(p) not in now})
        self._holds.clear()
        for optimizer in [each for each, given in self.optimizers.items() if given]:
            self.add_optimizer(optimizer)

    def forget_unused(self) -> None:
        """Forget models that the program no longer uses. Collective."""
        if not self._roots:
            return
        self.in_use = []
        self._stepped.clear()
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
        """Close `self.reduction` and set it to None, because it holds references to parameters."""
        if self.reduction is not None:
            try:  # noqa: SIM105 -- `contextlib` may be gone when Python exits
                self.reduction.close()
            except ReferenceError:
                pass
        self.reduction, self._plain, self.coupled_gradients = None, None, False

    def _apply(self, new: Sequence[nn.Module], plan: Plan, again: bool) -> None:
        if again and plan.parameters_divided:
            raise UsageError(
                f"mw.distribute was called a second time with a model, but {plan} supports only one such call. Pass "
                "all models in one call."
            )
        together = nn.ModuleList(new) if len(new) > 1 else new[0]
        world = self.world
        if collectives.world_size(collectives.everyone()) == 1 and not world.given:  # use the models' own device
            world = replace(world, device=next((str(p.device) for p in together.parameters()), world.device))
        said: Any = {"piggyback_loss": self._piggyback_loss, "stage_cost": self.stage_cost}
        setup = apply(together, plan, world, samples=self._samples, **said)
        self.pipeline = setup.pipeline
        for note in setup.notes:
            self._notify(note)
        if plan.dtypes.computed != plan.dtypes.stored:
            for model in new:
                parallel.precision.compute_in(model, plan.dtypes, world.device)
        reduction, coupled = setup.reduction, setup.coupled_gradients or self.coupled_gradients
        if again and world.size > 1:
            self._drop()
            reduction = parallel.data.reduction_of(self.named_parameters(), plan, piggyback_loss=self._piggyback_loss)
        if plan.parameters_divided and reduction is not None:  # avoids a reference cycle through the model's hooks
            reduction = weakref.proxy(reduction)
        self.reduction, self.coupled_gradients, self._plain = reduction, coupled, setup.plain

    def add_optimizer(self, optimizer: Optimizer) -> None:
        """Replace the parameters in `optimizer` with the parameters that the plan has made from them."""
        self.optimizers[optimizer] = True
        if optimizer in self._bound:
            return
        now = self.named_parameters()
        names = {id(p): name for name, p in now.items()}
        held = held_parameters(optimizer)
        old = {id(p): self._replaced[p] for p in held if p in self._replaced}
        if not old and not any(id(p) in names for p in held):
            return  # the optimizer's model may be passed later
        if old:
            parallel.rebind.rebind(optimizer, names | old, now)
        if self.plan is not None and self.plan != Plan():
            bind(optimizer, self.plan, self.world)
            self._bound.add(optimizer)
        self._holds.pop(weakref.ref(optimizer), None)

    def close(self) -> None:
        """Forget all models. Their gradients are no longer reduced."""
        self._roots, self._modules, self._alive = {}, {}, 0
        self._drop()

    def check_has_models(self) -> None:
        """Raise UsageError if a backward begins on several ranks, but there is no model whose gradients could be
        reduced."""
        if self.world.size > 1 and (self.plan is None or not self._alive):
            gone = "has no reference left" if self._roots else "was never distributed"
            raise UsageError(
                f"backward: the model {gone}, so gradients would come from one rank alone. Pass the model that you "
                "train to mw.distribute, and keep a reference to it."
            )

    def plain(self, result: Any) -> Any:
        """Return the result of a loss function with plain tensors (see `Reduction.plain`)."""
        plain = self._plain if self.reduction is None else self.reduction.plain
        if plain is None:
            return result
        return plain(result) if isinstance(result, Tensor) else map_tensors(plain, result)

    def begin_backward(self) -> None:
        """Count a backward that begins. Record which optimizers have stepped since the previous backward."""
        self.backwards += 1
        if self._stepped and self._stepped != self.in_use:  # listed in the order of `optimizers`, alike on all ranks
            self.in_use = [ref for optimizer in self.optimizers if (ref := weakref.ref(optimizer)) in self._stepped]
        self._stepped.clear()

    def reduced_backward(self, loss: Tensor, last: bool, factor: Callable[[], Tensor] | None) -> None:
        """Run the backward of a job's microbatch. last: whether it is the last microbatch of its step."""
        if self.reduction is not None:
            self.reduction.backward(loss, reduce=last, factor=factor, whole=True)
        else:
            self._backward(loss, factor)

    def _backward(self, loss: Tensor, factor: Callable[[], Tensor] | None) -> None:
        loss.backward()
        if factor is not None:
            by = factor()
            for p in self.named_parameters().values():
                if p.grad is not None:
                    p.grad.mul_(by.to(p.grad.dtype))

    def check_step(self, optimizer: Optimizer) -> bool:
        """Check a step of `optimizer`, and reduce gradients that are not reduced. Return False if it trains other
        models."""
        reduction, own, holds = self.reduction, weakref.ref(optimizer), self.holds(optimizer)
        ours = holds.ours
        if reduction is not None or self._replaced:
            if holds.foreign or holds.replaced or not ours:
                ours = self._check_held(optimizer, holds)
            if ours and holds.new:
                self._first_step(optimizer, holds)
            if ours and reduction is not None:
                if own in self._stepped or self.backwards == self.began:
                    self._check_backward(optimizer)
                if reduction.unreduced:
                    program_calls.leave_gradients()  # stop intercepting `.grad`, which FSDP sets while it reduces
                    reduction.reduce_now()
        if own not in self._stepped:
            self._stepped.append(own)
        return ours or self.optimizers.get(optimizer, False)

    def _first_step(self, optimizer: Optimizer, holds: _Holds) -> None:
        if self.plan and self.plan.parameters_divided:
            parallel.shard_refusals.check_steps_on_parts(optimizer)
        self.optimizers.setdefault(optimizer, False)
        self._holds[weakref.ref(optimizer)] = replace(holds, new=False)

    def _check_backward(self, optimizer: Optimizer) -> None:
        stale = weakref.ref(optimizer) in self._stepped or optimizer not in self._older
        if stale and not self.by_construction and any(p.grad is not None for p in held_parameters(optimizer)):
            raise UsageError(NOT_OURS)

    def holds(self, optimizer: Optimizer) -> _Holds:
        """Return which parameters the optimizer holds."""
        count = 0
        for group in optimizer.param_groups:
            count += len(group["params"])
        known = self._holds.get(weakref.ref(optimizer))
        return known if known is not None and known.count == count else self._look_up(optimizer, count)

    def _look_up(self, optimizer: Optimizer, count: int) -> _Holds:
        held, ours = held_parameters(optimizer), {id(p) for p in self.named_parameters().values()}
        foreign = tuple(p for p in held if id(p) not in ours)
        replaced = any(p in self._replaced for p in held)
        known, holds = _Holds(count, len(foreign) < count, foreign, replaced), self._holds
        holds[weakref.ref(optimizer, lambda gone: holds.pop(gone, None))] = known
        self.may_draw |= not is_by_numbers(optimizer)
        return known

    def _check_held(self, optimizer: Optimizer, holds: _Holds) -> bool:
        if holds.replaced:
            raise UsageError(
                "optimizer.step(): this optimizer was made before mw.distribute and not passed to it. Its parameters "
                "are those from before sharding, so the step would not change the model. Pass the optimizer to "
                "mw.distribute with the model, or create it afterwards."
            )
        if not holds.ours:
            if self.optimizers.get(optimizer):
                raise UsageError(
                    "optimizer.step(): this optimizer was passed to mw.distribute, but none of its parameters belongs "
                    "to a distributed model. Pass the model that it trains to mw.distribute too."
                )
            return False
        for p in holds.foreign:
            if p.grad is not None and not self.by_construction:
                raise UsageError(
                    f"optimizer.step(): the optimizer has a parameter of shape {tuple(p.shape)} that belongs to no "
                    "distributed model, so its gradient comes from one rank alone. Pass the module that owns this "
                    "parameter to mw.distribute too."
                )
        return True
