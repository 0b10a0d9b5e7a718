"""Pass hidden states forwards and gradients backwards between pipeline stages.

Sends do not wait. A stage keeps a forward's output until its gradients arrive, and sent gradients until its next
backward. From the schedule, a rank knows what others send next. It keeps tensors that it does not need yet.
Shapes and structure are sent once for each kind of batch. For a split tensor, each rank sends its part to the rank at
the same position in the other stage, which holds the same part there.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from meshwise.parallel.schedule import Action
from meshwise.parallel.splits.tensor import Form, Hidden, form_of, split_again
from meshwise.spec.errors import PlanError
from meshwise.torch_compat.dispatch import rehearsing
from meshwise.torch_compat.reducer import version
from meshwise.torch_compat.torch_function import on_parts
from meshwise.torch_compat.tree import map_kind, map_tensors, tensors_in
from meshwise.transfer import collectives, stages
from meshwise.transfer.stages import Pipe


class Pass:
    """The forward of one microbatch in one stage, which runs the blocks `own[0]` to `own[1] - 1`."""

    def __init__(
        self, action: Action, own: tuple[int, int], is_last: bool, blocks: Sequence[tuple[str, nn.Module]]
    ) -> None:
        self.action, (self.lo, self.hi), self.is_last, self._blocks = action, own, is_last, blocks
        self.received: Any = None
        self.carried: list[Any] = []
        self.forms: dict[int, Any] = {}  # the `Form` of each block's output so far, by block number
        self.device = torch.device("cpu")
        self.gradients: list[Tensor | None] = []  # the gradient of each received tensor, filled in by the backward
        self.output: Any = None
        self.sent: list[Tensor] = []
        self.left = False
        self._poisons: dict[Form, Tensor] = {}
        self._entered = self._gave = 0
        self._trains = torch.is_grad_enabled()

    @property
    def came_to_its_blocks(self) -> bool:
        """Whether the forward has reached this stage's blocks. Always true on the first stage."""
        return self._entered > 0 or self.lo == 0

    def passed_by(self, number: int, *, again: bool = False) -> Any:
        """Return the output of block `number`, which an earlier stage runs, to the model's code that calls this block.
        For the last block before this stage, this is the received hidden state. For earlier blocks, it is NaN tensors.

        again: whether a checkpoint makes the call, to recompute the forward during the backward.
        """
        if number < self.lo - 1:
            return map_kind(Form, self._poison, self.forms[number])
        if again:
            return self.received
        stages.put_down(self.carried)
        stages.enter_own_layers(True)
        return self.received

    def _poison(self, form: Form) -> Tensor:
        """Return NaN, or 0 for integers, in place of an earlier block's output."""
        if (found := self._poisons.get(form)) is None or found.is_inference() or version(found):
            value = torch.nan if form.dtype.is_floating_point else 0
            found = self._poisons[form] = torch.full(form.shape, value, dtype=form.dtype, device=self.device)
        return split_again(found, form.parts)

    def enter(self, number: int) -> None:
        """Check a call of block `number`, a block of this stage. Raises PlanError if the model calls its blocks in
        another order than they are listed, or calls this block without gradients in training."""
        name, block = self._blocks[number]
        if self._trains and not torch.is_grad_enabled() and any(p.requires_grad for p in block.parameters()):
            raise PlanError(
                f"pipeline: block {name} runs without gradients while the model trains. Reversible layers and "
                "reentrant checkpoints do this. Use data or tensor for this model."
            )
        if number != self.lo + self._entered:
            again = number < self.lo + self._entered
            what = "was called twice" if again else "was called before blocks that are listed earlier"
            raise PlanError(
                f"pipeline: in one loss, block {name} {what}. A pipeline needs a loss that calls the model once, "
                "and a model that calls its blocks in their order. Use shard or tensor instead of pipeline."
            )
        self._entered += 1

    def leave(self, number: int, result: Any) -> None:
        """Record the output of a block of this stage. After the stage's last block, keep the output to be sent."""
        self._gave += 1
        if not self.is_last:
            self.forms[number] = form_of(result)
        if number == self.hi - 1:
            # Send a copy: code after the block may write into the output, and the next stage runs that code again.
            self.output = result if self.is_last else map_tensors(torch.clone, result)
            self.carried = stages.take_along()
            if not self.is_last:
                stages.leave_own_layers(self._blocks[number][1])

    def check_complete(self, ranks: int) -> None:
        """Raise PlanError if the forward missed a block of the stage, or ended before the first block of the next
        stage."""
        if self._gave != self.hi - self.lo or not (self.is_last or self.left):
            missing = self._blocks[self.lo + self._gave if self._gave < self.hi - self.lo else self.hi][0]
            raise PlanError(
                f"pipeline={ranks}: the loss did not call block {missing}. Stages need every block in every forward, "
                "one after the other. Use shard or tensor for this model."
            )

    def end(self, *, check: bool) -> bool:
        """End the forward, and keep what is to be sent to the next stage. With `check`, return whether this stage's
        output contains NaN although its input does not. Otherwise return False."""
        sent = list(tensors_in(self.output))
        with on_parts():
            wrong = check and _has_nan(sent) and not _has_nan(tensors_in(self.received))
            if not self.is_last:
                self.sent = sent
                self.form = Hidden(form_of(self.output), self.carried, self.forms)
        self.output, self._poisons = None, {}
        return wrong

    def let_go(self) -> None:
        """Free the tensors of this forward. Called after its backward."""
        self.received = self.output = None
        self.sent, self._poisons = [], {}


class Passing:
    """Sends and receives hidden states and gradients between this rank and the other pipeline stages."""

    def __init__(self, pipe: Pipe, count: int, device: torch.device) -> None:
        """count: the number of stages. device: the device on which received tensors are stored."""
        self._pipe, self._stages, self._device = pipe, count, device
        self._known: dict[tuple[int, object], Hidden] = {}
        self._sends: dict[Action, list[Callable[[], None]]] = {}
        self._keys: Sequence[object] = ()
        self._coming: dict[int, deque[Action]] = {}
        self._kept: dict[Action, tuple[Hidden, list[Tensor]]] = {}
        self.checked = 0

    def begin(self, every: Sequence[Sequence[Action]], keys: Sequence[object]) -> None:
        """Begin a step.

        every: the actions of each rank. keys: see `Pipeline.begin`.
        """
        self._keys = [(key, torch.is_grad_enabled()) for key in keys]
        own = self._pipe.rank
        self._coming = {
            rank: deque(a for a in actions if self._target(a) == own)
            for rank, actions in enumerate(every)
            if rank != own
        }
        self._kept.clear()

    def finish(self) -> None:
        """Wait until all sends are complete."""
        for action in list(self._sends):
            self._free_sent(action)

    def _free_sent(self, action: Action) -> None:
        """Wait until the other rank has received what an action has sent, and free it."""
        for wait in self._sends.pop(action, ()):
            wait()

    def _rank(self, stage: int) -> int:
        return stage % self._pipe.size

    def _target(self, action: Action) -> int | None:
        """Return the rank that receives the result of an action, or None if no rank receives it."""
        following = action.stage + (1 if action.forward else -1)
        return self._rank(following) if 0 <= following < self._stages else None

    # Methods for forwards.

    def send_forward(self, now: Pass) -> None:
        target = self._target(now.action)
        assert target is not None
        self._send(now.action, target, now.form, now.sent)

    def receive_forward(self, now: Pass) -> None:
        """Receive the hidden state from the stage before, in the structure that the last block of that stage
        returned."""
        before = Action(True, now.action.stage - 1, now.action.microbatch)
        hidden, tensors = self._receive(before)
        now.carried, now.forms, now.device = hidden.carried, dict(hidden.before), self._device
        now.gradients = [None] * len(tensors)
        training = torch.is_grad_enabled()
        parts = iter(
            split_again(_enter(now, place, tensor) if training and form.trained else tensor, form.parts)
            for place, (form, tensor) in enumerate(zip(hidden.tensors, tensors, strict=True))
        )
        now.received = map_kind(Form, lambda form: next(parts), hidden.form)

    # Methods for backwards.

    def begin_backward(self, now: Pass) -> None:
        """Free what the previous microbatch's backward has sent."""
        if self._stages == self._pipe.size:  # with several stages per rank, waiting here could deadlock
            self._free_sent(Action(False, now.action.stage, now.action.microbatch - 1))

    def receive_backward(self, now: Pass) -> Tensor:
        """Receive the gradients of what this stage sent. Return a scalar whose backward continues with them."""
        after = Action(False, now.action.stage + 1, now.action.microbatch)
        pairs = [tensor for tensor in now.sent if tensor.requires_grad]
        _, gradients = self._receive(after)
        self._free_sent(now.action)
        with on_parts():
            return _Begin.apply(gradients, *pairs) if pairs else torch.zeros(())  # type: ignore[no-untyped-call]

    def send_backward(self, now: Pass) -> None:
        """Send gradients to the stage before."""
        if now.action.stage:
            action = Action(False, now.action.stage, now.action.microbatch)
            target = self._target(action)
            hidden = self._known[now.action.stage - 1, self._keys[now.action.microbatch]]
            found = [
                torch.zeros(form.shape, dtype=form.dtype, device=self._device) if gradient is None else gradient
                for form, gradient in zip(hidden.tensors, now.gradients, strict=True)
                if form.trained
            ]
            assert target is not None
            self._send(action, target, None, found)
        now.let_go()

    # Methods for both directions.

    def _send(self, action: Action, target: int, hidden: Hidden | None, tensors: Sequence[Tensor]) -> None:
        group = self._pipe.towards(self._pipe.rank, target)
        sends = self._sends.setdefault(action, [])  # not a new list: sends of a failed step may still be pending
        if hidden is not None:
            key = action.stage, self._keys[action.microbatch]
            known = self._known.get(key)
            if known is None:
                self._known[key] = hidden
                sends.append(stages.send_object(hidden, target, group))
            elif known.tensors != hidden.tensors:
                raise PlanError(
                    f"pipeline={self._pipe.size}: for two batches of the same shapes, hidden states have the shapes "
                    f"{[form.shape for form in known.tensors]} and {[form.shape for form in hidden.tensors]}. In "
                    "stages, batches of equal shapes need hidden states of equal shapes. Use shard for this model."
                )
        with on_parts():
            sends += [collectives.begin_send(tensor, target, group) for tensor in tensors]

    def _receive(self, wanted: Action) -> tuple[Hidden, list[Tensor]]:
        """Return the result of another stage's action, received now or kept from before."""
        source = self._rank(wanted.stage)
        while wanted not in self._kept:
            action = self._coming[source].popleft()
            self._kept[action] = self._take(action, source)
        return self._kept.pop(wanted)

    def _take(self, action: Action, source: int) -> tuple[Hidden, list[Tensor]]:
        group = self._pipe.towards(source, self._pipe.rank)
        if action.forward:
            key = action.stage, self._keys[action.microbatch]
            if key not in self._known:
                self._known[key] = stages.receive_object(source, group)
            hidden = self._known[key]
            forms = hidden.tensors
        else:
            hidden = self._known[action.stage - 1, self._keys[action.microbatch]]
            forms = [form for form in hidden.tensors if form.trained]
        tensors = [torch.empty(form.shape, dtype=form.dtype, device=self._device) for form in forms]
        return hidden, [collectives.receive(tensor, source, group) for tensor in tensors]


def _has_nan(tensors: Iterable[Tensor]) -> bool:
    return not rehearsing() and any(bool(t.isnan().any()) for t in tensors if t.is_floating_point())


def _enter(now: Pass, place: int, tensor: Tensor) -> Tensor:
    token = torch.zeros((), dtype=tensor.dtype, device=tensor.device, requires_grad=True)
    with on_parts():
        entered: Tensor = _Enter.apply(token, now, place, tensor)  # type: ignore[no-untyped-call]
    return entered


class _Enter(torch.autograd.Function):
    """An autograd function that puts a received tensor into this stage's graph. Its output is no leaf, so blocks may
    write to it. Its backward stores the gradient in `Pass.gradients`, from which it is sent to the previous stage."""

    @staticmethod
    def forward(ctx: Any, token: Tensor, now: Pass, place: int, tensor: Tensor) -> Tensor:
        ctx.now, ctx.place = now, place
        return tensor.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, ...]:
        ctx.now.gradients[ctx.place] = gradient
        return None, None, None, None


class _Begin(torch.autograd.Function):
    """An autograd function that returns a scalar. The backward of the scalar continues at `tensors`, with the gradients
    that another stage has sent."""

    @staticmethod
    def forward(ctx: Any, gradients: list[Tensor], *tensors: Tensor) -> Tensor:
        ctx.gradients = gradients
        return tensors[0].new_zeros(())

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return None, *ctx.gradients
