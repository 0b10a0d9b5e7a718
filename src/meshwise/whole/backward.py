"""Run the program's own backwards: `loss.backward()` and `torch.autograd.grad`.

Gradients are averaged over the ranks in the buckets of the plan (parallel/data.py). A loss that is a term travels with
them, and so does the number of its targets, if the loss comes from calls of distributed models alone. Otherwise that
number went ahead, where the loss was made.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from meshwise.compat.beside_dispatch import transforming
from meshwise.compat.torch_function import on_parts
from meshwise.engine.engine import Engine
from meshwise.process.session import sized
from meshwise.spec.errors import UsageError
from meshwise.splits.crossing import averaged
from meshwise.splits.tensor import SplitTensor, parts_of, split_again
from meshwise.whole.alike import Alike
from meshwise.whole.axis import DataAxis
from meshwise.whole.by_hand import say_sized
from meshwise.whole.gradient_hooks import behind_the_reduction
from meshwise.whole.term import Term, factor_of, plain, settled
from meshwise.workers.verb_log import came_to

_backward, _grad = torch.autograd.backward, torch.autograd.grad


class Backwards:
    """Stands for `torch.autograd.backward` and `torch.autograd.grad` while a program sees whole batches."""

    def __init__(self, engine: Engine, axis: DataAxis | None) -> None:
        """axis: the ranks over which batches are divided; None on one device."""
        self._engine, self._axis = engine, axis
        self.third: Callable[[], None] = lambda: None
        """Called in the third backward of a program."""
        self._options: dict[str, Any] | None = None  # of the backward that runs now
        self._in_grad = False
        self._parameters: list[weakref.ref[nn.Parameter]] = []
        self.alike: Alike | None = None
        """Looks whether all ranks run the same program."""

    def average(self, parameters: Iterable[nn.Parameter]) -> None:
        """Average the gradients of these parameters over the ranks."""
        new = list(parameters)
        self._axis.average(new)
        self._parameters += map(weakref.ref, new)

    def begin(self) -> Callable[[], None]:
        """Replace torch's functions wherever a module holds them. Return a function that puts them back."""
        backward, grad = self.backward, self.grad
        _replace({id(_backward): backward, id(_grad): grad})
        return lambda: _replace({id(backward): _backward, id(grad): _grad})

    def backward(
        self,
        tensors: Any,
        grad_tensors: Any = None,
        retain_graph: bool | None = None,
        create_graph: bool = False,
        grad_variables: Any = None,
        inputs: Any = None,
    ) -> None:
        """Add the gradients of one device to `.grad`. See `torch.autograd.backward`."""
        if self._options is not None or self._axis is None and create_graph or torch._C._current_graph_task_id() != -1:  # the reduction's own, or a block's
            options = {"retain_graph": retain_graph, "create_graph": create_graph, "inputs": inputs}
            options = options if self._options is None else self._options
            _backward(tensors, grad_tensors if grad_tensors is not None else grad_variables, **options)
            return
        if create_graph:
            raise UsageError(
                "loss.backward(create_graph=True) is not possible with view=\"whole\": gradients in .grad are averaged "
                "over the ranks in place. Write gradients = torch.autograd.grad(loss, parameters, create_graph=True)."
            )
        loss = _one(tensors, grad_tensors if grad_tensors is not None else grad_variables)
        self._options = {"retain_graph": retain_graph} | ({} if inputs is None else {"inputs": inputs})
        try:
            self._run(loss)
        finally:
            self._options = None

    def _run(self, loss: Tensor) -> None:
        came_to("backward")
        engine = self._engine
        if self.alike is not None:
            self.alike.backward_begins()
        if sized:
            say_sized(engine)
        program = engine.program
        for hear in engine.events.backward_begins:
            hear(loss, engine.part, None, None, "")
        program.begin_backward()
        if program.backwards == program.began + 3:
            self.third()
        value = None
        try:
            with behind_the_reduction(self._parameters):
                value = self._reduced(loss)
        finally:
            for hear in engine.events.backward_ends:
                hear(value, value)
        if program.backwards >= engine.events.due:
            engine.events.tell()

    def _reduced(self, loss: Tensor) -> Tensor | None:
        """Run the backward of a loss, and return the loss if all ranks know it."""
        reduction = self._engine.program.reduction
        if reduction is None:
            _backward(plain(settled(loss)) * loss.axis.gradient_scale if isinstance(loss, Term) else loss, **self._options or {})
            return None
        if not isinstance(loss, Term):
            reduction.backward(loss)
            return loss.detach()
        root, size, kept = loss.known.root, self._axis.size, []
        with on_parts():
            local = loss.as_subclass(Tensor) * size
        if root.value is not None and loss.assumed:
            local, loss = local * factor_of(loss).to(local.dtype), settled(loss)
        if root.value is not None:
            reduction.backward(local)
            return loss.known.get()
        assert root.local is not None
        sent = root.local.reshape(1)
        if loss.assumed:
            kept = [(p, p.grad) for ref in self._parameters if (p := ref()) is not None and p.grad is not None]
            for p, _ in kept:
                p.grad = None
            assert root.count is not None
            sent = torch.cat([sent.to(torch.promote_types(sent.dtype, torch.float32)), root.count.reshape(1).to(sent.dtype)])
        means = reduction.backward(local, value=sent)
        assert means is not None
        root.set(means * size if root.count is not None else (means[0] * size).to(root.local.dtype).reshape(root.local.shape))
        if loss.assumed:
            self._divided(factor_of(loss), kept)
        return loss.known.get()

    def _divided(self, factor: Tensor, kept: Sequence[tuple[nn.Parameter, Tensor]]) -> None:
        """Give the gradients of this backward the factor that their loss lacked, and add those of earlier backwards."""
        reached = [p for ref in self._parameters if (p := ref()) is not None and p.grad is not None]
        on_cpu = factor.device.type == "cpu"  # elsewhere the host does not wait for the number
        if reached and (not on_cpu or abs(float(factor) - 1) > 1e-12):
            gradients = [getattr(p.grad, "_local_tensor", p.grad) for p in reached]
            with torch.no_grad():
                torch._foreach_mul_(gradients, float(factor) if on_cpu else factor)
        for p, gradient in kept:
            p.grad = gradient if p.grad is None else gradient.add_(p.grad)

    def grad(self, outputs: Any, inputs: Any, grad_outputs: Any = None, *args: Any, **kwargs: Any) -> Any:
        """Return the gradients of one device. See `torch.autograd.grad`."""
        batched = kwargs.get("is_grads_batched") or (len(args) > 4 and args[4])
        inside = self._in_grad or transforming or torch._C._current_graph_task_id() != -1
        if inside or batched or self._axis is None:
            return _grad(outputs, inputs, grad_outputs, *args, **kwargs)
        asked = (inputs,) if isinstance(inputs, Tensor) else tuple(inputs)
        loss = _one(outputs, grad_outputs)
        local = plain(settled(loss)) * self._axis.gradient_scale if isinstance(loss, Term) else loss
        self._in_grad = True  # under a default device, torch calls its function anew
        try:
            with on_parts():
                found = _grad(local, asked, None, *args, **kwargs)
        finally:
            self._in_grad = False
        return tuple(None if g is None else self._of_whole(g, each) for g, each in zip(found, asked, strict=True))

    def _of_whole(self, gradient: Tensor, asked: Tensor) -> Tensor:
        """Return the gradient of a tensor of the program."""
        if isinstance(asked, SplitTensor) and 0 in asked.parts:
            with on_parts():
                gradient = gradient / self._axis.gradient_scale
            return split_again(gradient, parts_of(asked))
        return averaged(gradient, self._axis) if self._axis.averages(asked) else gradient


def _one(tensors: Any, gradients: Any) -> Tensor:
    """Return one scalar whose gradient is that of all these tensors, given the gradients of each."""
    each = (tensors,) if isinstance(tensors, Tensor) else tuple(tensors)
    given = (gradients,) if gradients is None or isinstance(gradients, Tensor) else tuple(gradients)
    given = given if len(given) == len(each) else given * len(each)
    if len(each) == 1 and given[0] is None:
        if each[0].numel() != 1:
            raise RuntimeError("grad can be implicitly created only for scalar outputs")
        return each[0] if each[0].dim() == 0 or isinstance(each[0], Term) else each[0].sum()
    terms = [t if g is None else (t * g).sum() for t, g in zip(each, given, strict=True)]
    total = terms[0]
    for term in terms[1:]:
        total = total + term
    return total


def _replace(functions: dict[int, Any]) -> None:
    for module in list(sys.modules.values()):
        for name in ("backward", "grad"):
            value = vars(module).get(name) if hasattr(module, "__dict__") else None
            if id(value) in functions:
                setattr(module, name, functions[id(value)])
