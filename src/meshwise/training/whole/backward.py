"""Run the program's own backwards: `loss.backward()` and `torch.autograd.grad`.

Gradients are averaged over the ranks in the buckets of the plan (parallel/data.py). A loss that is a `Term` is
sent with them, and so is the number of its targets, if the loss comes from calls of distributed models alone. Otherwise
that number is sent earlier, when the loss is computed.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from meshwise.parallel.splits.crossing import averaged
from meshwise.parallel.splits.hooks import ParameterHooks
from meshwise.parallel.splits.rows_axis import DataAxis
from meshwise.parallel.splits.sums import own_gradient
from meshwise.parallel.splits.tensor import SplitTensor
from meshwise.parallel.splits.term import Term, gradient_of_sum, over_count, plain, settled, value_of
from meshwise.parallel.technique import CARRIED
from meshwise.spec.errors import UsageError
from meshwise.torch_compat.beside_dispatch import transforming
from meshwise.torch_compat.program_calls import put
from meshwise.torch_compat.reducer import in_backward, multiply_each, run_backward
from meshwise.torch_compat.sharding import locals_of
from meshwise.torch_compat.torch_function import on_parts
from meshwise.training.engine import steps
from meshwise.training.engine.engine import Engine
from meshwise.workers.verb_log import log_verb


class Backwards:
    """Replaces `torch.autograd.backward` and `torch.autograd.grad` while a program sees whole batches."""

    def __init__(self, engine: Engine, axis: DataAxis | None, third: Callable[[], None] = lambda: None) -> None:
        """axis: the ranks over which batches are divided; None on one device. third: is called in the third backward
        of a program."""
        self._engine, self._axis, self._third = engine, axis, third
        self._options: dict[str, Any] | None = None  # keyword arguments of the running backward, if any
        self._in_grad = False
        self._parameters: list[weakref.ref[nn.Parameter]] = []
        self._hooks = ParameterHooks(self._parameters)

    def add(self, parameters: Iterable[nn.Parameter]) -> None:
        """Add parameters whose gradients the plan's reduction handles."""
        self._parameters += map(weakref.ref, parameters)

    def begin(self) -> Callable[[], None]:
        """Replace torch's functions wherever a module holds them. Return a function that puts them back."""
        ends = contextlib.ExitStack()
        self._backward, self._grad = torch.autograd.backward, torch.autograd.grad
        for name, theirs, ours in (("backward", self._backward, self.backward), ("grad", self._grad, self.grad)):
            holders = [each for each in list(sys.modules.values()) if getattr(each, "__dict__", {}).get(name) is theirs]
            ends.callback(put(holders, name, functools.partial(lambda made, _: made, ours)))
        return ends.close

    def backward(
        self,
        tensors: Any,
        grad_tensors: Any = None,
        retain_graph: bool | None = None,
        create_graph: bool = False,
        grad_variables: Any = None,
        inputs: Any = None,
    ) -> None:
        """Add to `.grad` the gradients that one device would compute. See `torch.autograd.backward`."""
        given = grad_tensors if grad_tensors is not None else grad_variables
        inner = self._options is not None or in_backward()  # called by the reduction or a recomputed block
        if inner or (self._axis is None and create_graph):
            self._backward(tensors, given, retain_graph, create_graph, inputs=inputs)
            return
        if create_graph:
            raise UsageError(
                'loss.backward(create_graph=True) is not possible with view="whole": gradients in .grad are averaged '
                "over the ranks in place. Write gradients = torch.autograd.grad(loss, parameters, create_graph=True)."
            )
        loss = _one(tensors, given)
        self._options = {"retain_graph": retain_graph} | ({} if inputs is None else {"inputs": inputs})
        try:
            self._run(loss)
        finally:
            self._options = None

    def _run(self, loss: Tensor) -> None:
        log_verb("backward")
        engine, program = self._engine, self._engine.program
        for hear in engine.events.backward_begins:
            hear(loss, engine.part, None, None, "")
        program.begin_backward()
        if program.backwards == program.began + 3:
            self._third()
        value = None
        try:
            with steps.watched(engine), self._hooks.behind_the_reduction():
                value = self._reduced(loss)
        finally:
            for hear in engine.events.backward_ends:
                hear(value, value)
        if program.backwards >= engine.events.due:
            engine.events.tell()
        if engine.watcher is not None:
            engine.watcher.loss_known(loss.detach() if value is None else torch.as_tensor(value, dtype=loss.dtype))

    def _reduced(self, loss: Tensor) -> Tensor | float | None:
        """Run the backward of a loss, and return the loss if all ranks know it."""
        reduction, reduce = self._engine.program.reduction, self._engine.reduce
        run = functools.partial(self._begin_at, None)
        if reduction is None:
            run((_local(loss),))
            return None
        if not isinstance(loss, Term):
            # A rehearsal has no axis, so its loss is no `Term`, but it must reduce the loss as a real run does.
            value = None if self._axis is not None else loss.detach()
            reduction.backward(loss, reduce=reduce, value=value, run=run)
            return loss.detach()
        # The gradients of several losses are averaged at once. To scale those of this loss, it must be summed now.
        if not reduce or reduction.unreduced:
            value_of(loss)
        root, size, kept = loss.known.root, loss.axis.size, list[tuple[nn.Parameter, Tensor]]()
        local, waits = plain(loss), loss.assumed and root.value is None
        run = functools.partial(self._begin_at, torch.full_like(local, size / loss.assumed if waits else size))
        if root.value is not None:
            reduction.backward(over_count(local, loss) if loss.assumed else local, reduce=reduce, run=run)
            return loss.known.get(reduce=True)
        if waits:
            kept = self._gradients()
            for p, _ in kept:
                p.grad = None
        sent = root.sent(CARRIED)
        means: Any = reduction.backward(local, value=sent.reshape(-1), run=run)
        root.set(means if sent.dim() == 1 else means.reshape(sent.shape), size)
        if waits:
            self._divide(loss.assumed / (root.total if isinstance(root.total, Tensor) else root.total or 1), kept)
        return loss.known.get(reduce=True)

    def _begin_at(self, scale: Tensor | None, tensors: tuple[Tensor, ...], gradients: Any = None) -> None:
        """Run a backward with the options of the program's call. scale: the gradient of the first tensor, the loss."""
        options = self._options or {}
        if scale is None or len(tensors) > 1 or "inputs" in options:
            gradients = gradients if scale is None else (scale, *(gradients or (scale,))[1:])
            self._backward(tensors, gradients, **options)
        else:
            run_backward(tensors[0], scale, bool(options.get("retain_graph")))

    def _gradients(self) -> list[tuple[nn.Parameter, Tensor]]:
        held = [p for ref in self._parameters if (p := ref()) is not None]
        return [(p, p.grad) for p in held if p.grad is not None]

    def _divide(self, factor: Tensor | float, kept: list[tuple[nn.Parameter, Tensor]]) -> None:
        """Multiply this backward's gradients by `factor`, which its loss lacked, and add the earlier gradients in
        `kept`."""
        if (isinstance(factor, Tensor) or abs(factor - 1) > 1e-12) and (gradients := [g for _, g in self._gradients()]):
            with torch.no_grad():
                multiply_each(locals_of(gradients), factor)
        for p, gradient in kept:
            p.grad = gradient if p.grad is None else gradient.add_(p.grad)

    def grad(self, outputs: Any, inputs: Any, grad_outputs: Any = None, *args: Any, **kwargs: Any) -> Any:
        """Return the gradients that one device would compute. See `torch.autograd.grad`."""
        batched = kwargs.get("is_grads_batched") or (len(args) > 4 and args[4])
        inside = self._in_grad or transforming or in_backward()
        if inside or batched or self._axis is None:
            return self._grad(outputs, inputs, grad_outputs, *args, **kwargs)
        asked = (inputs,) if isinstance(inputs, Tensor) else tuple(inputs)
        twice = kwargs.get("create_graph") or any(args[1:2])
        tensor = twice and self._engine.plan.tensor > 1 and any(isinstance(x, nn.Parameter) for x in asked)
        if tensor or any(isinstance(x, DTensor) for x in asked):
            return self._grad_of_shards(_one(outputs, grad_outputs), asked, *args, **kwargs)
        local = _local(_one(outputs, grad_outputs))
        self._in_grad = True  # torch.set_default_device makes torch call this method again from `self._grad`
        try:
            with on_parts():
                found = self._grad(local, asked, None, *args, **kwargs)
        finally:
            self._in_grad = False
        pairs, axis = zip(found, asked, strict=True), self._axis
        return tuple(None if gradient is None else _of_whole(gradient, x, axis) for gradient, x in pairs)

    def _grad_of_shards(
        self,
        loss: Tensor,
        asked: tuple[Tensor, ...],
        retain_graph: bool | None = None,
        create_graph: bool = False,
        only_inputs: bool = True,
        allow_unused: bool | None = None,
        **_: Any,
    ) -> tuple[Tensor | None, ...]:
        """Return gradients of sharded parameters. The graph has gathered copies, so this runs a backward."""
        held = [p for ref in self._parameters if (p := ref()) is not None]
        if create_graph or any(all(x is not p for p in held) for x in asked):
            raise UsageError(
                "torch.autograd.grad of divided parameters accepts only parameters, and no create_graph: a rank holds "
                "its part of them. Run this script without shard and tensor."
            )
        kept = [(p, p.grad) for p in held]
        for p in held:
            p.grad = None
        try:
            self.backward(loss, retain_graph=retain_graph)
            found = tuple(x.grad for x in asked)
        finally:
            for p, gradient in kept:
                p.grad = gradient
        if not allow_unused and any(gradient is None for gradient in found):
            raise RuntimeError("One of the differentiated Tensors appears to not have been used in the graph.")
        return found


def _of_whole(gradient: Tensor, x: Tensor, axis: DataAxis) -> Tensor:
    """Return the gradient of `x` that the program would get on one device."""
    if isinstance(x, SplitTensor) and 0 in x.parts:
        return own_gradient(gradient, x)
    if isinstance(x, Term):
        return gradient_of_sum(gradient, x)
    return averaged(gradient, axis) if axis.averages(x) else gradient


def _local(loss: Tensor) -> Tensor:
    """Return the tensor at which a backward of this rank begins."""
    return plain(settled(loss)) * loss.axis.gradient_scale if isinstance(loss, Term) else loss


def _one(tensors: Any, gradients: Any) -> Tensor:
    """Return a scalar whose backward gives the same gradients as `tensors` with the given `gradients`."""
    each: tuple[Tensor, ...] = (tensors,) if isinstance(tensors, Tensor) else tuple(tensors)
    given = (gradients,) if gradients is None or isinstance(gradients, Tensor) else tuple(gradients)
    given = given if len(given) == len(each) else given * len(each)
    if len(each) == 1 and given[0] is None:
        loss, summed = each[0], isinstance(each[0], Term)
        with on_parts() if summed else contextlib.nullcontext():
            size, dims = loss.numel(), loss.dim()
        if size != 1:
            raise RuntimeError("grad can be implicitly created only for scalar outputs")
        return loss if summed or dims == 0 else loss.sum()
    first, *others = [x if g is None else (x * g).sum() for x, g in zip(each, given, strict=True)]
    return functools.reduce(torch.add, others, first)
