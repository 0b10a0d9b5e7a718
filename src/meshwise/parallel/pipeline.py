"""Run a model's blocks as stages of a pipeline.

This is pipeline parallelism: each rank of the axis has stages, which are consecutive blocks of the model, and works on
one microbatch after the other.

Each stage runs the job's `loss(model, batch)`, and no line of the model changes. Blocks of earlier stages are skipped:
the last of them returns what the stage before has sent, and the others return NaN of the right shape, so that a model
that reads these values is detected. The forward ends at the first block of a later stage. The last stage runs the
forward to its end and computes the loss.

For modules outside of the blocks (embeddings, norms, heads), see holding.py.
"""

from __future__ import annotations

import functools
import math
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from meshwise.parallel.blocks import repeated_blocks
from meshwise.parallel.holding import Holding, StageWrites, let_go, own_state, refused
from meshwise.parallel.passing import Pass, Passing
from meshwise.parallel.probe_optimizer import unlike_by_parameters
from meshwise.parallel.schedule import CHUNKS, Action, forwards, orders, stage_ranges
from meshwise.parallel.step_hooks import needs_closure
from meshwise.parallel.technique import Cost, Setup, Technique, reached_parameters
from meshwise.spec.errors import MeshwiseError, PlanError
from meshwise.spec.plan import Plan
from meshwise.spec.units import bytes_text
from meshwise.spec.words import some
from meshwise.spec.world import World
from meshwise.torch_compat.modules import put_forward, takes_hooks
from meshwise.transfer import collectives, stages
from meshwise.transfer.stages import Pipe

LOOKS = 3  # forwards of each stage to check for NaN, from the start and again after the first step


class Pipeline:
    """Runs the blocks of a model as stages of a pipeline.

    For each microbatch, call `run` for its forward and then `back` for its backward.
    """

    def __init__(self, model: nn.Module, plan: Plan, pipe: Pipe, cost: Cost | None = None) -> None:
        self.pipe = pipe
        self._schedule = plan.schedule
        self._chunks = CHUNKS.get(plan.schedule, 1)
        self.stages = pipe.size * self._chunks
        self._blocks = repeated_blocks(model)
        self._ranges = stage_ranges(costs_of(self._blocks, cost), self.stages)
        self.own = range(pipe.rank, self.stages, pipe.size)
        """The numbers of the stages on this rank."""
        self._looks = LOOKS * len(self.own)  # number of forwards still to check
        self._now: Pass | None = None
        self._again: Pass | None = None  # the pass whose backward is running
        self._writes = StageWrites()
        mine = [block for stage in self.own for _, block in self._blocks[slice(*self._ranges[stage])]]
        self.holding = Holding(model, pipe, [block for _, block in self._blocks], mine)

    def take_blocks(self, let_go_parts: Callable[[set[str]], list[Any]] | None) -> None:
        """Replace the forwards of all blocks of the model, so that this rank runs only the blocks of its own stages
        from now on.

        let_go_parts: called with the names of parameters that only other stages need. It frees this rank's shards of
            them (see `Setup.let_go`). None if parameters are not sharded.
        """
        for number, (_, block) in enumerate(self._blocks):
            put_forward(block, functools.partial(_run_block, weakref.ref(self), number, block.forward))
        self.holding.let_go_parts = let_go_parts
        self.holding.let_go_again()
        self._passing = Passing(self.pipe, self.stages, next(self.holding.model.parameters()).device)

    @property
    def last_rank(self) -> int:
        """The index, within the pipeline, of the rank that runs the last stage and computes the loss."""
        return self.pipe.size - 1

    def note(self, whole: int) -> str:
        """Return a sentence for the user on which blocks each stage has.

        whole: the number of elements in all parameters.
        """
        cut = [self._blocks[lo:hi] for lo, hi in self._ranges]
        parts = [[p for _, block in blocks for p in block.parameters()] for blocks in cut]
        text = "; ".join(
            f"stage {n}: {blocks[0][0]}{f' to {blocks[-1][0]}' if blocks[1:] else ''} "
            f"({bytes_text(sum(p.nbytes for p in own))} of parameters)"
            for n, (blocks, own) in enumerate(zip(cut, parts, strict=True))
        )
        inside = sum(p.numel() for own in parts for p in own)
        return (
            f"pipeline={self.pipe.size}: {text}. These blocks have {inside / max(whole, 1):.0%} of the parameters. "
            "Every rank keeps the other parameters during the first step; later, only ranks that use them do."
        )

    def begin(self, keys: Sequence[object]) -> Sequence[Action]:
        """Begin a step. Returns this rank's actions, in order.

        keys: one key for each microbatch. Hidden states of microbatches with equal keys have equal shapes.
        """
        self.holding.check_same()
        every = orders(self._schedule, self.pipe.size, len(keys))
        self._passing.begin(every, keys)
        return every[self.pipe.rank]

    def begin_forward(self, key: object) -> Sequence[Action]:
        """Begin a forward of one batch without a backward. Returns this rank's actions, in order."""
        every = forwards(self.pipe.size, self._chunks)
        self._passing.begin(every, [key])
        return every[self.pipe.rank]

    def is_last(self, action: Action) -> bool:
        """Return whether an action belongs to the last stage, which computes the loss."""
        return action.stage == self.stages - 1

    def run(self, action: Action, call: Callable[[], Any]) -> tuple[Pass, Any]:
        """Run the forward of a microbatch in a stage: receive from the stage before, call `call`, and send to the next
        stage.

        Returns the `Pass`, which `back` takes, and the result of `call`. In all stages but the last, the result is
        None.
        """
        lo, hi = self._ranges[action.stage]
        now = Pass(action, (lo, hi), self.is_last(action), self._blocks)
        if action.stage:
            self._passing.receive_forward(now)
        self._now = now
        self.holding.show(True)
        self._writes.begin(self.holding.model)
        stages.enter_own_layers(action.stage == 0)
        result: Any = None
        try:
            result = call()
        except Leave:
            pass
        except Exception as error:
            said = refused(error, self.pipe.size) if isinstance(error, RuntimeError) else None
            if said is not None:
                raise said from error
            if now.came_to_its_blocks or isinstance(error, MeshwiseError):
                raise
            raise PlanError(
                f"pipeline={self.pipe.size}: the code before block {self._blocks[lo][0]} raised "
                f"{type(error).__name__}: {str(error).rstrip('.')}. On this stage that code has only the shapes of "
                "earlier blocks' outputs, not their values. Use shard or tensor for this model."
            ) from error
        finally:
            self._now = None
            self._writes.end()
            self.holding.show(False)
            stages.enter_own_layers(True)
        now.check_complete(self.pipe.size)
        looks = action.stage > 0 and action.microbatch == 0 and self._looks > 0
        self._looks -= looks
        if now.end(check=looks):
            raise PlanError(
                f"pipeline={self.pipe.size}: the stage that begins with {self._blocks[lo][0]} reads more than the "
                "output of the block before it: a skip connection, the output of an encoder, or layers that run in "
                "another order than they are listed. Use shard or tensor for this model."
            )
        if now.is_last:
            return now, result
        self._passing.send_forward(now)
        return now, None

    def back(self, now: Pass, loss: Tensor | None, run: Callable[[Tensor], None]) -> None:
        """Run the backward of one microbatch in one stage, then send gradients to the stage before.

        now: the `Pass` that `Pipeline.run` returned for this microbatch and stage.
        loss: the loss of the microbatch in the last stage, None in all other stages.
        run: called once with a scalar, and must call `backward()` on it. In the last stage, the scalar is the loss. In
            other stages, the backward of the scalar starts from the gradients that the next stage has sent.
        """
        self._passing.begin_backward(now)
        scalar = self._passing.receive_backward(now) if loss is None else loss
        if not self.holding.decided:
            self.holding.reached |= reached_parameters(scalar)
        self._again = now
        try:
            run(scalar if scalar.requires_grad else torch.zeros((), requires_grad=True))
        except RuntimeError as error:
            raise refused(error, self.pipe.size) or error from error
        finally:
            self._again = None
        self._passing.send_backward(now)

    def finish(self) -> None:
        """Finish a step after its backwards: sum the gradients of parameters that several stages hold. Collective.

        The first step also decides which stages keep the parameters outside of the blocks.
        """
        self._passing.finish()
        if not self.holding.decided:
            self.holding.decide()
            self._looks = LOOKS * len(self.own)
        self.holding.add_up()

    def finish_forward(self) -> None:
        """Finish a forward that has no backward."""
        self._passing.finish()

    def block_call(self, number: int, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run a block that belongs to this stage. Skip a block that belongs to an earlier stage. End the forward at a
        block that belongs to a later stage."""
        now, again = self._now, self._again
        if now is None and again is not None:  # a checkpoint recomputes the block
            if number < again.hi:
                return again.passed_by(number, again=True) if number < again.lo else forward(*args, **kwargs)
            raise PlanError(
                f"pipeline={self.pipe.size}: torch.utils.checkpoint wraps blocks of two stages, and would recompute "
                f"block {self._blocks[number][0]}, which is on another stage. Give each block its own checkpoint."
            )
        if now is None:
            raise PlanError(
                f"pipeline={self.pipe.size}: the model was called outside of the job's loss and metrics, but this rank "
                "has only some of its layers. Call the model in job.metrics, or load the saved weights into a separate "
                "model."
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
    """Raised to end a stage's forward after its last block. `except Exception` in the model does not catch it."""


def _run_block(
    ref: weakref.ref[Pipeline], number: int, forward: Callable[..., Any], /, *args: Any, **kwargs: Any
) -> Any:
    pipeline = ref()
    return forward(*args, **kwargs) if pipeline is None else pipeline.block_call(number, forward, args, kwargs)


def costs_of(blocks: Sequence[tuple[str, nn.Module]], cost: Cost | None) -> list[float]:
    """Return the cost of each block: the number of its parameters, or, if given, what `cost` returns on rank 0."""
    if cost is None:
        return [sum(p.numel() for p in block.parameters()) for _, block in blocks]
    found = [cost(name, block) for name, block in blocks]
    for (name, _), value in zip(blocks, found, strict=True):
        if not isinstance(value, int | float) or not 0 <= value < math.inf:
            raise PlanError(f"stage_cost({name!r}, block) returned {value!r}. It must return a number of at least 0.")
    costs: list[float] = collectives.tell_all(found)
    return costs


def _check_model(setup: Setup) -> None:
    plan = setup.plan
    blocks = repeated_blocks(setup.model)
    needed = plan.pipeline * CHUNKS.get(plan.schedule, 1)
    if not blocks:
        raise PlanError(
            f"pipeline={plan.pipeline}: {type(setup.model).__name__} has no repeated layers to cut into stages, such "
            "as a ModuleList or Sequential with several entries of one class. Use shard or data."
        )
    if len(blocks) < needed:
        per = f" with {needed // plan.pipeline} stages per rank" if needed > plan.pipeline else ""
        fits = len(blocks) // (needed // plan.pipeline)
        use = f"Use pipeline={fits}" if fits > 1 else "Use shard or data"
        raise PlanError(
            f"pipeline={plan.pipeline}{per} needs {needed} blocks, but {type(setup.model).__name__} has {len(blocks)} "
            f"({some([name for name, _ in blocks])}). {use}."
        )
    config = getattr(setup.model, "config", None)
    for name in ("output_router_logits", "output_hidden_states", "output_attentions"):
        if getattr(config, name, False) is True:
            raise PlanError(
                f"pipeline={plan.pipeline}: {name} collects values of all layers, but the layers are on different "
                f"ranks. Set {name}=False in the model's configuration, or use shard."
            )
    for each in (config, *(value for value in vars(config or plan).values() if hasattr(value, "to_dict"))):
        for name in ("layerdrop", "encoder_layerdrop", "decoder_layerdrop"):
            if getattr(each, name, 0):
                raise PlanError(
                    f"pipeline={plan.pipeline}: {name}={getattr(each, name)} skips layers at random, but stages need "
                    f"every block in every forward. Set {name}=0.0 in the model's configuration, or use shard."
                )


def _hold(setup: Setup) -> None:
    pipe = stages.pipe()
    if pipe is None:
        return
    whole = sum(p.numel() for p in setup.model.parameters())
    setup.pipeline = pipeline = Pipeline(setup.model, setup.plan, pipe, setup.stage_cost)
    setup.notes.append(pipeline.note(whole))


def _apply(setup: Setup) -> None:
    if setup.pipeline is not None:
        setup.pipeline.take_blocks(setup.let_go)


def _bind(optimizer: Optimizer, plan: Plan, world: World) -> None:
    kind = type(optimizer).__name__
    if needs_closure(optimizer) or not takes_hooks(optimizer):
        raise PlanError(
            f"pipeline={plan.pipeline}: {kind} may need all parameters on each rank. Use only data parallelism."
        )
    if why := unlike_by_parameters(optimizer):
        raise PlanError(
            f"pipeline={plan.pipeline}: each rank steps only some of the parameters, and {kind} may then compute "
            f"different values: {why}. Use only data parallelism, or another optimizer."
        )
    optimizer.register_load_state_dict_pre_hook(own_state)
    first: list[Any] = []

    def stepped(optimizer: Optimizer, *unused: Any) -> None:
        let_go(optimizer)
        first.pop().remove()

    first.append(optimizer.register_step_post_hook(stepped))


STAGES = Technique(check_model=_check_model, apply=_hold)
PIPELINE = Technique(apply=_apply, bind=_bind)
