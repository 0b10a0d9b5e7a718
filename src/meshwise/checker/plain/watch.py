"""Watch the computation, optimizer steps and output of a plain script."""

from __future__ import annotations

import builtins
import contextlib
import functools
import sys
from collections.abc import Callable, Iterator
from functools import partial
from traceback import extract_tb
from typing import Any

import numpy
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from meshwise.checker.loss_numbers import NotedNumbers
from meshwise.checker.plain.lightning import on_workers
from meshwise.checker.plain.neutral import NORMS, neutral, on_cpu
from meshwise.checker.plain.reads import PASSES, Reads
from meshwise.checker.plain.record import Follow, Record, Step
from meshwise.checker.plain.schedule import TRAINER, watch_ticks
from meshwise.checker.plain.values import copied, parameters_in, settings_of, sketched, take_settings, value_after
from meshwise.checker.short_loops import LATER, ScriptEnds
from meshwise.checker.sketches import pieces
from meshwise.checker.upcast import called_in_float64, plain_attention, upcast
from meshwise.hardware.memory import free_bytes
from meshwise.parallel.step_hooks import Order, has_closure, subscribe
from meshwise.spec.errors import UsageError
from meshwise.spec.units import bytes_text
from meshwise.spec.user_code import frame_in, is_users, place, place_of, user_place
from meshwise.spec.world import World
from meshwise.torch_compat import program_calls
from meshwise.torch_compat.dispatch import without_interception
from meshwise.torch_compat.modules import gradient_hooks, move_hook, persistent_tensors
from meshwise.torch_compat.sharding import local_of
from meshwise.training.autograd.loss_graph import scale_of
from meshwise.training.engine.seeds import seed_all
from meshwise.workers.failure import is_communication_error

MOST_BACKWARDS = 40
"""A script may run this many backward passes, on average, for each step to record. If it runs more, it is ended."""
NOT_REPLICAS = "FullyShardedDataParallel keeps flat parameters, which check cannot name. Use fully_shard (FSDP2)"
EXCHANGES = ("all_gather", "all_gather_into_tensor", "all_gather_object", "all_reduce", "broadcast")
OUTSIDE = "its forward does not go through the DistributedDataParallel"


def watch_plain(script: Callable[[], object], steps: int, seed: int, follow: Follow | None, world: World) -> Record:
    """Run `script` in this process as `python script.py` would, and return a record of what it did."""
    watcher = _Watcher(steps, seed, follow, world)
    seed_all(seed + world.rank)
    with (
        watcher.watching(),
        on_cpu(),
        upcast(),
        called_in_float64(),
        plain_attention(),
        neutral(watcher.reads.rows),
        watcher.noted.noting(),
        contextlib.suppress(ScriptEnds),
    ):
        try:
            script()
        except SystemExit as end:
            if end.code not in (None, 0):
                raise
        except StopIteration:
            if not watcher.reads.has_cut:  # if the check cut a loop short, next() in the script may raise StopIteration
                raise
        except Exception as error:
            if not watcher.record.steps or not is_communication_error(error):
                raise
            frames = [each for each in extract_tb(error.__traceback__) if is_users(each.filename)]
            places = [place(each.filename, each.lineno) for each in frames]
            watcher.record.lost = places[-1] if places else type(error).__name__
    return watcher.ended()


class _Watcher:
    """Records one run of the script."""

    def __init__(self, steps: int, seed: int, follow: Follow | None, world: World) -> None:
        self.record = Record(world.rank)
        self._steps, self._follow, self._ranks = steps, follow, world.size
        self.reads = Reads(steps, seed, follow, self.record.passes)
        self.noted = NotedNumbers()
        self._names: dict[int, tuple[Tensor, str]] = {}
        self._known_roots = set[int]()
        self._known = set[int]()  # ids of the modules of these roots
        self._seen = set[int]()  # ids of the models whose state was recorded since the last step
        self._hooked: dict[int, Tensor] = {}
        self._inside: list[nn.Module] = []  # the modules whose forward runs now
        self._roots = list[Any]()
        self._forward_at = ""
        self._wrapped_forward = False  # whether a forward of DDP ran with gradients enabled since the last step
        self._stepping: Optimizer | None = None
        self._backwards = 0
        self._made: dict[int, int] = {}  # maps an optimizer's id to its number of steps
        self._optimizers: dict[int, tuple[Optimizer, int]] = {}
        self._norms: dict[str, None] = {}
        self._used: dict[int, float] = {}  # maps a batch norm's id to the norm of its last running mean
        self._parallel: list[DistributedDataParallel] = []
        self._reduced_at: tuple[str, ...] = ()  # the communication hooks of DDP
        self._ends: list[Callable[[], None]] = []
        self._next = Step()  # holds the backwards since the last step
        self._backward_at = ""
        self._exchanged = False  # whether the program's own code called a collective since the last step

    def ended(self) -> Record:
        """Return what was recorded."""
        self.record.norms = tuple(self._norms)
        self.record.left = self._next.losses
        self.record.accelerate = "accelerate" in sys.modules
        return self.record

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Record what the script computes and prints inside the with block."""
        put = program_calls.put
        self._ends += [
            put([DistributedDataParallel], "__init__", self._wrap),
            put([DistributedDataParallel], "register_comm_hook", self._reduction_hook),
            put([torch.autograd], "backward", self._backward),
            put([torch.autograd], "grad", self._grad),
            put([nn.utils, nn.utils.clip_grad], "clip_grad_norm_", self._clip),
            put([nn.utils, nn.utils.clip_grad], "clip_grad_value_", self._clip),
            *watch_ticks(self.record),
            put([builtins], "print", self._print),
            *(put([dist, dist.distributed_c10d], name, self._exchange) for name in EXCHANGES),
            *on_workers(self._ranks, self.record, self.reads),
            subscribe(Order.GUARD, self._before_step, self._after_step).remove,
            register_optimizer_step_pre_hook(self._before_closure).remove,
            register_module_forward_pre_hook(self._forward).remove,
            register_module_forward_hook(self._left, always_call=True).remove,
        ]
        try:
            yield
        finally:
            for end in reversed(self._ends):
                end()
            self.reads.close()

    # What the script computes.

    def _forward(self, module: nn.Module, inputs: Any) -> None:
        if isinstance(module, NORMS) and module.training and torch.is_grad_enabled():
            self._norms.setdefault(type(module).__name__)
        if isinstance(module, NORMS) and not module.training and module.running_mean is not None:
            used = float(module.running_mean.norm())
            if self._used.get(id(module)) != used:
                self._used[id(module)] = used
                self.record.evaluated.append(used)
        if isinstance(module, FullyShardedDataParallel):
            self.record.refused = NOT_REPLICAS
            raise ScriptEnds
        self._inside.append(module)
        if len(self._inside) > 1 and (id(module) in self._known or not any(True for _ in module.parameters())):
            return  # FSDP may just have replaced the parameters of a module of a model
        if isinstance(module, DistributedDataParallel):
            self._wrapped_forward |= torch.is_grad_enabled()
        if id(module) in self._known_roots:
            self._forward_at = user_place() if torch.is_grad_enabled() else self._forward_at
            self._look(module)
            return
        if any(id(p) not in self._names for p in module.parameters()):
            self._known_roots.add(id(module))
            self._known |= set(map(id, module.modules()))
            self._roots.append(module)
            taken = {name for _, name in self._names.values()}
            for name, p in module.named_parameters():
                if id(p) in self._names:
                    continue
                name = name.replace("module.", "").replace("_orig_mod.", "")
                if name in taken:
                    name = f"{name} of model {len(self._roots)}"
                self._names[id(p)] = p, name
            self._forward_at = user_place()
            self._look(module)

    def _left(self, module: nn.Module, inputs: Any, output: Any) -> None:
        if module in self._inside:
            del self._inside[self._inside.index(module) :]

    def _look(self, model: nn.Module) -> None:
        """Record the state of a model, once between two steps, and from now on its parameters' own gradients."""
        if id(model) in self._seen:
            return
        self._seen.add(id(model))
        number = self._roots.index(model)
        of_model = f" of model {number}" if number else ""
        with without_interception(), torch.no_grad():
            for path, module in model.named_modules():
                own = {id(p) for p in module.parameters(recurse=False)}
                for name, value in persistent_tensors(module).items() if not isinstance(module, NORMS) else ():
                    whole = f"{path}.{name}".replace("module.", "").lstrip(".") + of_model
                    key = self._name(value) if id(value) in own else whole
                    self._next.state[key] = sketched(value)
        for p in model.parameters():
            if p.requires_grad and id(p) not in self._hooked:
                self._hooked[id(p)] = p
                move_hook(p.register_hook(partial(self._own, self._name(p))), last=False)

    def _own(self, name: str, gradient: Tensor) -> None:
        if type(gradient) is Tensor and self._next.own:
            with without_interception():
                self._next.own[-1][name] = self._next.own[-1].get(name, 0.0) + pieces(gradient.detach())

    def _wrap(self, plain: Any) -> Any:
        @functools.wraps(plain)
        def init(model: DistributedDataParallel, *arguments: Any, **named: Any) -> None:
            plain(model, *arguments, **named)
            self.record.wrapped = True
            self._parallel.append(model)

        return init

    def _reduction_hook(self, plain: Any) -> Any:
        @functools.wraps(plain)
        def register(model: DistributedDataParallel, state: object, hook: Any) -> None:
            self._reduced_at += (place_of(hook) or user_place(),)
            plain(model, state, hook)

        return register

    def _exchange(self, plain: Any) -> Any:
        @functools.wraps(plain)
        def exchange(*given: Any, **named: Any) -> Any:
            caller = sys._getframe(1)
            if is_users(caller.f_code.co_filename):  # a library, such as the Trainer, gathers numbers for itself
                self._exchanged = True
                here = place(caller.f_code.co_filename, caller.f_lineno)
                self._next.exchanges += [here] if not self._next.own else []
            return plain(*given, **named)

        return exchange

    def _backward(self, plain: Any) -> Any:
        @functools.wraps(plain)
        def backward(tensors: Any, *arguments: Any, **named: Any) -> Any:
            self._backwards += 1
            if self._backwards > MOST_BACKWARDS * (self._steps + PASSES * LATER):
                raise ScriptEnds
            losses = [tensors] if isinstance(tensors, Tensor) else list(tensors)
            self._next.own.append({})
            self._next.batches.append(self.reads.at)
            if losses and losses[0].numel() == 1:
                self._next.losses.append(float(losses[0].detach()))
                self._next.scales.append(scale_of(losses[0]))
                self._next.of_loss.append([*self.noted.of(losses[0])])
                self._next.numbers.append(self.noted.since_then())
                self._next.rows.append(self.reads.size)
                if not self.record.steps:
                    _ = [self._name(leaf) for leaf in parameters_in(losses[0])]
            self._backward_at, self._next.by_trainer = user_place(), frame_in(TRAINER) is not None
            if self._backward_at == self._forward_at and any(self._next.of_loss):  # both are the call of a Trainer
                self._forward_at = self._next.of_loss[-1][-1][0]
            self._next.draws |= self.reads.backward()
            no_sync = any(not each.require_backward_grad_sync for each in self._parallel)
            self._next.unreduced = "its backward is inside no_sync()" if no_sync else ""
            return plain(tensors, *arguments, **named)

        return backward

    def _grad(self, plain: Any) -> Any:
        """Take a gradient of parameters for a backward, but not one that is differentiated again."""
        backward = self._backward(plain)

        @functools.wraps(plain)
        def grad(outputs: Any, inputs: Any, *arguments: Any, **named: Any) -> Any:
            of = [inputs] if isinstance(inputs, Tensor) else list(inputs)
            trains = all(isinstance(each, nn.Parameter) for each in of) and not named.get("create_graph")
            return (backward if trains else plain)(outputs, of, *arguments, **named)

        return grad

    def _clip(self, plain: Any) -> Any:
        @functools.wraps(plain)
        def clip(parameters: Any, *arguments: Any, **named: Any) -> Any:
            held = [parameters] if isinstance(parameters, Tensor) else list(parameters)
            gradients = {self._name(p): copied(p.grad) for p in held if p.grad is not None}
            norms = [float(gradient.norm()) for gradient in gradients.values()]
            self._next.clips.append((user_place(), float(numpy.linalg.norm(norms)) if norms else 0.0))
            self._next.unclipped = gradients | self._next.unclipped
            return plain(held, *arguments, **named)

        return clip

    def _before_closure(self, optimizer: Optimizer, arguments: Any, named: Any) -> Any:
        """Let a step begin when its closure, which computes the gradients, has been called."""
        given = [*arguments[1:], *named.values()]
        if not given or not callable(given[0]):
            return None

        def closure() -> Any:
            loss = given[0]()
            self._before_step(optimizer, (), {})
            return loss

        return (arguments[0], closure), {}

    def _before_step(self, optimizer: Optimizer, arguments: Any, named: Any) -> None:
        if has_closure(arguments, named):
            return
        held = [p for group in optimizer.param_groups for p in group["params"]]
        if self._stepping is not None or all(p.grad is None for p in held):  # ZeRO's inner step, or no gradients
            return
        self._stepping = optimizer
        self.record.wrapped |= dist.is_initialized()
        if not self.record.steps:
            self._refuse_large(held)
        number = self._optimizers.setdefault(id(optimizer), (optimizer, len(self._optimizers)))[1]
        hooks = tuple(
            dict.fromkeys(place for p in held for place in map(place_of, gradient_hooks(p)[0].values()) if place)
        )
        step, self._next = self._next, Step()
        step.optimizer, step.places = number, (self._forward_at, self._backward_at, user_place())
        step.settings = [settings_of(group) for group in optimizer.param_groups]
        step.gradients = {self._name(p): copied(p.grad) for p in held if p.grad is not None}
        known = {self._name(p): p for p in (*held, *(p for p, _ in self._names.values()))}
        for name, p in known.items():
            if local_of(p).untyped_storage().size():  # FSDP frees some
                step.starts[name] = sketched(p)
        step.ticks, step.hooks, step.reduced_at = self.record.ticks, hooks, self._reduced_at
        step.unreduced = step.unreduced or ("" if self._wrapped_forward or not self._parallel else OUTSIDE)
        self.record.steps.append(step)
        if ranks := self._followed(number):
            for group, settings in zip(optimizer.param_groups, ranks[0].settings, strict=False):
                take_settings(group, settings)
            for p in held:
                name = self._name(p)
                there = next((each.gradients[name] for each in ranks if name in each.gradients), None)
                if p.grad is not None and there is not None and there.shape == p.grad.shape:
                    local_of(p.grad).copy_(there)  # so that an update differs only if the optimizer's step does

    def _refuse_large(self, held: list[Tensor]) -> None:
        needed = 2 * 8 * sum(p.numel() for p in held) * (self._steps + PASSES * LATER) * 3
        free = free_bytes(torch.device("cpu"))
        if needed > free:
            raise UsageError(
                "check keeps gradients and parameters of each step in float64, which takes about "
                f"{bytes_text(needed)}, but only {bytes_text(free)} are free. Use --steps 1, or a smaller model."
            )

    def _after_step(self, optimizer: Optimizer) -> None:
        if optimizer is not self._stepping:
            return
        self._stepping = None
        held = [p for group in optimizer.param_groups for p in group["params"]]
        number, step = self._optimizers[id(optimizer)][1], self.record.steps[-1]
        step.parameters = {self._name(p): copied(p) for p in held}
        if ranks := self._followed(number):
            for p in held:
                if (there := value_after(ranks, self._name(p))) is not None and there.shape == p.shape:
                    local_of(p.detach()).copy_(there)
        self._made[number] = self._made.get(number, 0) + 1
        self.record.ticks = 0
        self.reads.step_made()
        self._next, self._wrapped_forward, self._backward_at, self._exchanged = Step(), False, "", False
        self._seen.clear()
        self.noted.since_then()

    def _followed(self, number: int) -> list[Step]:
        """Return the ranks' steps that correspond to the step that an optimizer makes now, if all ranks make it."""
        ranks = [] if self._follow is None else self._follow.ranks
        made = self._made.get(number, 0)
        found = [[step for step in rank.steps if step.optimizer == number][made : made + 1] for rank in ranks]
        return [step for each in found for step in each] if all(found) else []

    def _name(self, parameter: Tensor) -> str:
        if id(parameter) not in self._names:
            self._names[id(parameter)] = parameter, f"parameter {len(self._names)}, of no module"
        return self._names[id(parameter)][1]

    def _print(self, plain: Any) -> Any:
        @functools.wraps(plain)
        def show(*values: Any, **named: Any) -> None:
            where = user_place()
            if where and named.get("file") in (None, sys.stdout):
                last = self.record.passes[-1] if self.record.passes else None
                text = named.get("sep", " ").join(map(str, values))
                groups = (group for optimizer, _ in self._optimizers.values() for group in optimizer.param_groups)
                self.record.rates.update(float(group.get("lr", 0.0)) for group in groups)
                of_training = last is None or last.trained or not last.over
                self.record.shown.append((where, text, of_training and not self._exchanged))
            else:
                plain(*values, **named)

        return show
