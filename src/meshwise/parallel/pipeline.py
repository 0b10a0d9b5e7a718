"""Pipeline parallel: each rank of the axis has stages, consecutive blocks of the model, and works on one microbatch after
the other.

Each stage runs the job's own `loss(model, batch)`, and no line of the model changes. Blocks before its own are passed by:
the last of them gives what the stage before has sent, in the form in which that stage's last block gave it, and the others
give numbers that are none (NaN) of the same shape, so that a model that reads them is found out. The first block after
its own leaves the forward. The last stage comes to its end, and has the loss.

What lies outside of the blocks (embeddings, norms, heads) all ranks hold during the first step. Whose gradients that step
has found then decides: a parameter stays where it has one, and becomes NaN that takes no memory elsewhere; where several
stages have one (tied weights) their gradients are added up.

Tested in tests/parallel/test_pipeline.py.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.weak import WeakIdKeyDictionary

from meshwise.compat.optimizers import takes_hooks
from meshwise.parallel.blocks import repeated_blocks
from meshwise.parallel.passing import Pass, Passing
from meshwise.parallel.reduction import reached_parameters
from meshwise.parallel.schedule import CHUNKS, Action, forwards, orders, stage_ranges
from meshwise.parallel.step_hooks import held_parameters, needs_closure
from meshwise.parallel.technique import Setup, Technique
from meshwise.parallel.trial import unlike_by_parameters
from meshwise.spec.errors import PlanError
from meshwise.spec.plan import Plan
from meshwise.spec.words import some
from meshwise.spec.world import World
from meshwise.transfer import collectives, stages
from meshwise.transfer.stages import Pipe

LOOKS = 3  # first forwards of a stage, and those after what it holds has changed, of which values are read
_lacked = WeakIdKeyDictionary()  # parameters whose values are on other stages


class Pipeline:
    """A model whose blocks are stages of a pipeline. `run` a forward, `back` its backward, in the order of `actions`."""

    def __init__(self, model: nn.Module, plan: Plan, pipe: Pipe) -> None:
        self.pipe, self._model = pipe, weakref.ref(model)
        self._schedule = plan.schedule
        self._chunks = CHUNKS.get(plan.schedule, 1)
        self.stages = pipe.size * self._chunks
        self._blocks = repeated_blocks(model)
        costs = [sum(p.numel() for p in block.parameters()) for _, block in self._blocks]
        self._ranges = stage_ranges(costs, self.stages)
        self.own = range(pipe.rank, self.stages, pipe.size)
        """The stages of this rank."""
        self._passing = Passing(pipe, self.stages, next(model.parameters()).device)
        self._looks = LOOKS * len(self.own)  # forwards to be looked at
        self._now: Pass | None = None
        self._found = False
        self._reached: set[int] = set()
        self._live_modules: set[str] = set()
        self._trained: tuple[bool, ...] = ()
        self._shared: list[tuple[str, collectives.Group]] = []
        self.owned: set[str] = set()
        """Names of the parameters that count for this rank, of those that several stages hold."""
        for number, (_, block) in enumerate(self._blocks):
            block.forward = functools.partial(_run_block, weakref.ref(self), number, block.forward)
        self._hold_own_blocks()

    @property
    def model(self) -> nn.Module:
        """The model."""
        model = self._model()
        assert model is not None
        return model

    @property
    def last_rank(self) -> int:
        """The rank that has the last stage, and so the loss."""
        return self.pipe.size - 1

    # What this rank holds.

    def _hold_own_blocks(self) -> None:
        own = [block for stage in self.own for _, block in self._blocks[slice(*self._ranges[stage])]]
        others = [block for _, block in self._blocks if not any(block is mine for mine in own)]
        inside = {id(part) for block in others for part in block.modules()}
        kept = {
            id(p) for name, m in self.model.named_modules() if id(m) not in inside for p in m.parameters(recurse=False)
        }
        names = {name for name, p in self.model.named_parameters(remove_duplicate=False) if id(p) not in kept}
        _drop(self.model, names, self.pipe.rank)
        buffers = {
            f"{name}.{key}"
            for name, m in self.model.named_modules()
            if id(m) in inside
            for key, _ in m.named_buffers(recurse=False)
        }
        stages.now_lacks(self.model, names | buffers)
        outside = {id(m) for _, block in self._blocks for m in block.modules()}
        for name, module in self.model.named_modules():
            module.register_load_state_dict_pre_hook(_before_load)
            module.register_load_state_dict_post_hook(_after_load)
            if id(module) not in outside and any(True for _ in module.buffers(recurse=False)):
                module.register_forward_pre_hook(_Notes(self._live_modules, name))

    def _decide(self) -> None:
        """After the first step: who holds what lies outside of the blocks. Collective over all ranks."""
        model, own, size = self.model, self.pipe.rank, self.pipe.size
        named = dict(model.named_parameters())
        lacking = stages.lacks(model)
        mine = {name for name, p in named.items() if id(p) in self._reached}
        ranks = collectives.gather_objects((mine, set(self._live_modules), set(lacking)), self.pipe.group)
        drop: set[str] = set()
        groups: dict[tuple[int, ...], list[str]] = {}
        for name, p in named.items():
            holders = tuple(rank for rank, (reached, _, _) in enumerate(ranks) if name in reached)
            if len(holders) > 1:
                groups.setdefault(holders, []).append(name)
            if p.requires_grad and name not in lacking:
                able = [rank for rank, (_, _, lacks) in enumerate(ranks) if name not in lacks]
                if own not in (holders or able[-1:]):
                    drop.add(name)
            if own == (holders or (0,))[0]:
                self.owned.add(name)
        same = {name for name, p in model.named_parameters(remove_duplicate=False) if any(p is named[n] for n in drop)}
        _drop(model, same, own)
        stages.now_lacks(model, lacking | same | self._buffers_of_others([live for _, live, _ in ranks]))
        every = collectives.gather_objects(sorted(groups), collectives.everyone())
        pipes = sorted(set(collectives.gather_objects(collectives.ranks_of(self.pipe.group), collectives.everyone())))
        for holders in sorted({h for each in every for h in each}):
            for ranks_of_pipe in pipes:
                group = collectives.group_of([ranks_of_pipe[rank] for rank in holders])
                if ranks_of_pipe == collectives.ranks_of(self.pipe.group) and own in holders:
                    self._shared += [(name, group) for name in groups.get(holders, ())]
        self._trained = tuple(p.requires_grad for p in model.parameters())
        self._found, self._looks = True, LOOKS * len(self.own)

    def _buffers_of_others(self, live: Sequence[set[str]]) -> set[str]:
        """Buffers outside of the blocks whose modules ran on other stages alone."""
        found = set()
        for name in set().union(*live) - live[self.pipe.rank]:
            module = self.model.get_submodule(name)
            found |= {f"{name}.{key}" if name else key for key, _ in module.named_buffers(recurse=False)}
        return found

    # A step.

    def begin(self, keys: Sequence[object]) -> Sequence[Action]:
        """A step of so many microbatches begins; gives this rank's actions in their order. keys: of each microbatch: of
        two with equal ones the hidden states have one shape."""
        if self._found and tuple(p.requires_grad for p in self.model.parameters()) != self._trained:
            raise PlanError(
                f"pipeline={self.pipe.size}: parameters were frozen or thawed after the first step, which decided on "
                "which stage each is held. Freeze them before the run, or use shard instead of pipeline."
            )
        every = orders(self._schedule, self.pipe.size, len(keys))
        self._passing.begin(every, keys)
        return every[self.pipe.rank]

    def begin_forward(self, key: object) -> Sequence[Action]:
        """A forward alone begins, of one batch."""
        every = forwards(self.pipe.size, self._chunks)
        self._passing.begin(every, [key])
        return every[self.pipe.rank]

    def is_last(self, action: Action) -> bool:
        """Whether it is of the last stage, which has the loss."""
        return action.stage == self.stages - 1

    def run(self, action: Action, call: Callable[[], Any]) -> tuple[Pass, Any]:
        """The forward of a microbatch in a stage, received from the stage before and sent on; and what `call` gave, in
        the last stage."""
        lo, hi = self._ranges[action.stage]
        now = Pass(action, lo, hi, self.is_last(action), self._blocks)
        if action.stage:
            self._passing.receive_forward(now)
        self._now = now
        stages.enter_own_layers(action.stage == 0)
        result: Any = None
        try:
            result = call()
        except Leave:
            pass
        finally:
            self._now = None
            stages.enter_own_layers(True)
        now.check_complete(self.pipe.size)
        looks = 0 < action.stage and action.microbatch == 0 and self._looks > 0
        self._looks -= looks
        if now.end(check=looks):
            raise PlanError(
                f"pipeline={self.pipe.size}: the stage that begins with {self._blocks[lo][0]} reads more than what the "
                "block before it gives: a skip connection, the output of an encoder, or layers that run in another order "
                "than they are listed. Use shard or tensor for this model."
            )
        if now.is_last:
            return now, result
        self._passing.send_forward(now)
        return now, None

    def back(self, now: Pass, loss: Tensor | None, run: Callable[[Tensor], None]) -> None:
        """The backward of what `run` gave: `run(scalar)` runs autograd. loss: in the last stage."""
        scalar = self._passing.receive_backward(now) if loss is None else loss
        if not self._found:
            self._reached |= reached_parameters(scalar)
        if scalar.requires_grad:
            run(scalar)
        else:
            run(torch.zeros((), requires_grad=True))
        self._passing.send_backward(now)

    def finish(self) -> None:
        """The backwards of a step are over: add up the gradients of what several stages hold. Collective."""
        self._passing.finish()
        if not self._found:
            self._decide()
        named = dict(self.model.named_parameters()) if self._shared else {}
        for name, group in self._shared:
            p = named[name]
            if p.grad is None:
                p.grad = torch.zeros_like(p)
            collectives.all_reduce(p.grad, group=group, of="tied gradients")

    def finish_forward(self) -> None:
        """A forward alone is over."""
        self._passing.finish()

    def clip(self, norm: float) -> None:
        """Clip the gradients by their norm over all stages, what several hold counted once. Collective."""
        named = {n: p for n, p in self.model.named_parameters() if p.grad is not None}
        held_by_several = {name for name, _ in self._shared}
        counted = [p.grad for n, p in named.items() if n not in held_by_several or n in self.owned]
        own = torch.nn.utils.get_total_norm(counted) if counted else torch.zeros((), device=self._device())
        squares = collectives.all_reduce(own.double().square(), group=self.pipe.group, of="gradient norm")
        torch.nn.utils.clip_grads_with_norm_(named.values(), norm, squares.sqrt().to(own.dtype))

    def _device(self) -> torch.device:
        return next(self.model.parameters()).device

    def block_call(self, number: int, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """The call of a block in the forward of some stage."""
        now = self._now
        if now is None:
            raise PlanError(
                f"pipeline={self.pipe.size}: the model was called outside of the job's loss and metrics, and this rank "
                "has a part of its layers. Call it in job.metrics, or load the saved weights into a model of its own."
            )
        if number < now.lo:
            return now.passed_by(number)
        if number >= now.hi:
            now.left = True
            raise Leave
        now.enter(number)
        result = forward(*args, **kwargs)
        now.leave(number, result)
        return result


class Leave(BaseException):
    """Leaves the forward of a stage behind its last block. Not an Exception: the program's own handlers let it pass."""


class _Notes:
    """A hook that notes which modules ran inside the layers of this rank."""

    def __init__(self, into: set[str], name: str) -> None:
        self._into, self._name = into, name

    def __call__(self, *given: Any) -> None:
        if stages.counts():
            self._into.add(self._name)


def _run_block(
    ref: weakref.ref[Pipeline], number: int, forward: Callable[..., Any], /, *args: Any, **kwargs: Any
) -> Any:
    pipeline = ref()
    return forward(*args, **kwargs) if pipeline is None else pipeline.block_call(number, forward, args, kwargs)


def _drop(model: nn.Module, names: set[str], rank: int) -> None:
    """Let go of the values of these parameters, which other stages have: what is left is NaN of their shape, in the
    memory of one number."""
    for name, p in model.named_parameters(remove_duplicate=False):
        if name in names and p not in _lacked:
            _lacked[p] = True
            _empty(p)
            if p.requires_grad:
                p.register_post_accumulate_grad_hook(functools.partial(_refuse, name, rank))


def _empty(p: nn.Parameter) -> None:
    p.data = torch.full((), torch.nan, dtype=p.dtype, device=p.device).expand(p.shape)


def _before_load(module: nn.Module, *unused: Any) -> None:
    """What this rank lacks is loaded, too, so that torch compares shapes; then it is let go of again."""
    for p in module.parameters(recurse=False):
        if p in _lacked:
            p.data = torch.empty(p.shape, dtype=p.dtype, device=p.device)


def _after_load(module: nn.Module, unused: Any) -> None:
    for p in module.parameters(recurse=False):
        if p in _lacked:
            _empty(p)


def _refuse(name: str, rank: int, p: Tensor) -> None:
    raise PlanError(
        f"pipeline: the loss on stage {rank} reaches {name}, whose values are on another stage: it reads a parameter of a "
        "layer by itself, or one that the first step did not use. Use shard or tensor for this job."
    )


def _check_model(setup: Setup) -> None:
    plan = setup.plan
    if plan.pipeline == 1:
        return
    blocks = repeated_blocks(setup.model)
    needed = plan.pipeline * CHUNKS.get(plan.schedule, 1)
    if not blocks:
        raise PlanError(
            f"pipeline={plan.pipeline}: {type(setup.model).__name__} has no repeated layers that stages could be cut "
            "from: no list or sequence with several entries of one class. Use shard or data."
        )
    if len(blocks) < needed:
        per = f" of {needed // plan.pipeline} stages each" if needed > plan.pipeline else ""
        fits = len(blocks) // (needed // plan.pipeline)
        use = f"Use pipeline={fits}" if fits > 1 else "Use shard or data"
        raise PlanError(
            f"pipeline={plan.pipeline}{per} needs {needed} blocks, and {type(setup.model).__name__} has {len(blocks)} "
            f"({some([name for name, _ in blocks])}). {use}."
        )
    config = getattr(setup.model, "config", None)
    for name in ("output_router_logits", "output_hidden_states", "output_attentions"):
        if getattr(config, name, False) is True:
            raise PlanError(
                f"pipeline={plan.pipeline}: {name} collects values of all layers, which lie on different ranks. Set "
                f"{name}=False in the model's configuration, or use shard."
            )


def _apply(setup: Setup) -> None:
    pipe = stages.pipe()
    if setup.plan.pipeline == 1 or pipe is None:
        return
    whole = sum(p.numel() for p in setup.model.parameters())
    setup.pipeline = pipeline = Pipeline(setup.model, setup.plan, pipe)
    setup.notes.append(pipeline_note(pipeline, whole))


def pipeline_note(pipeline: Pipeline, whole: int) -> str:
    """What is on which stage, in a sentence."""
    cut = [[name for name, _ in pipeline._blocks[lo:hi]] for lo, hi in pipeline._ranges]
    text = "; ".join(
        f"stage {n}: {names[0]}" + (f" to {names[-1]}" if names[1:] else "") for n, names in enumerate(cut)
    )
    inside = sum(p.numel() for _, block in pipeline._blocks for p in block.parameters())
    return (
        f"pipeline={pipeline.pipe.size}: {text}. These blocks have {inside / max(whole, 1):.0%} of the parameters; what "
        "lies outside is held by every rank during the first step, and then where it is used."
    )


def _bind(optimizer: Optimizer, plan: Plan, world: World) -> None:
    if plan.pipeline == 1:
        return
    kind = type(optimizer).__name__
    if needs_closure(optimizer) or not takes_hooks(optimizer):
        raise PlanError(
            f"pipeline={plan.pipeline}: {kind} steps all parameters as one, and a rank has some. Use data alone."
        )
    if why := unlike_by_parameters(optimizer):
        raise PlanError(
            f"pipeline={plan.pipeline}: {kind} may not step each parameter by itself, and each rank has some of them: "
            f"{why}. Use data alone, or another optimizer."
        )
    optimizer.register_load_state_dict_pre_hook(_own_state)
    first = optimizer.register_step_post_hook(lambda *given: (_let_go(optimizer), first.remove()))


def _own_state(optimizer: Optimizer, saved: dict[str, Any]) -> dict[str, Any]:
    """Of a whole state that is loaded, what belongs to parameters of this rank."""
    numbers = [number for group in saved["param_groups"] for number in group["params"]]
    others = {n for n, p in zip(numbers, held_parameters(optimizer), strict=False) if p in _lacked}
    return {**saved, "state": {n: entry for n, entry in saved["state"].items() if n not in others}}


def _let_go(optimizer: Optimizer) -> None:
    """Drop the state of what this rank lacks since the first step: a state that was loaded before had it."""
    for p in held_parameters(optimizer):
        if p in _lacked:
            optimizer.state.pop(p, None)


PIPELINE = Technique(check_model=_check_model, apply=_apply, bind=_bind)
