"""Watch a model while it trains: what each module gave, which draws it made, when gradients were ready, what is left.

A module's output is kept as prints of each sample's row (see prints.py): ranks send prints, and the prints of the
ranks together are those of one device.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from meshwise.compat.dispatch import tensors_in, without_interception
from meshwise.compat.sharding import groups_of, sharded_modules
from meshwise.equivalence.lifted import lifted
from meshwise.equivalence.prints import prints_of
from meshwise.equivalence.seen import Named, Output, plain
from meshwise.training.keyed import Draw, KeyedDraws, Rows, by_reference, by_rows, on_one_device
from meshwise.transfer.sharded import full_tensor

WRAPPERS = ("_checkpoint_wrapped_module.", "_orig_mod.", "_fsdp_wrapped_module.")


class Watch:
    """Watches `model`. `begin` a step, call the loss through `loss`, and enter `backward` around each backward."""

    def __init__(self, model: nn.Module, seed: int, *, lift: bool) -> None:
        self._seed, self._lift = seed, lift
        self._step = 0
        self._rows: Sequence[Rows] = ()
        self._reference: Sequence[Sequence[Draw]] | None = None
        self._draws: list[KeyedDraws] = []
        self._numbers: dict[str, int] = {}
        self._watching = False
        self._model = model
        self._inside: list[list[int]] = []  # of each call that has not ended: draws before it, draws of calls inside it
        self._left: dict[str, float] | None = None
        self.outputs: list[Output] = []
        self.ready: list[str] = []
        self.touched: list[tuple[int, float, float, bool]] = []
        self.redrawn = False
        self.unkeyed: set[str] = set()
        self.drawing: set[str] = set()
        self.evaluation_draws = 0
        for name, module in model.named_modules():
            module.register_forward_pre_hook(self._entered)
            module.register_forward_hook(self._hook(clean(name), type(module).__name__))
        for name, p in model.named_parameters():
            if p.requires_grad:
                p.register_post_accumulate_grad_hook(self._ready_hook(clean(name)))

    def begin(self, step: int, rows: Sequence[Rows], reference: Sequence[Sequence[Draw]] | None = None) -> None:
        """A step begins: its rows and, on the side that follows, the draws of one device, an entry a microbatch."""
        self._step, self._rows, self._reference = step, rows, reference
        self._draws, self.outputs, self.ready = [], [], []
        self._left, self.touched, self.redrawn = None, [], False

    @property
    def draws(self) -> list[list[Draw]]:
        """The draws of this step, a list a microbatch."""
        return [draws.log for draws in self._draws]

    def loss(self, function: Callable[[nn.Module, Any], Any]) -> Callable[[nn.Module, Any], Any]:
        """A job's loss, watched: it begins the next microbatch of the step."""

        def watched(model: nn.Module, batch: Any) -> Any:
            with self.forward():
                return function(model, batch)

        return watched

    @contextlib.contextmanager
    def forward(self) -> Iterator[None]:
        """The forward of the next microbatch of the step."""
        number = len(self._draws)
        reference = None if self._reference is None else [*self._reference, *([] for _ in range(number + 1))][number]
        rows = self._rows[number]
        place = on_one_device if reference is None else by_reference(reference, rows)
        draws = KeyedDraws((self._seed, self._step, number), rows, place)
        self._draws.append(draws)
        self._numbers, self._watching, self._inside = {}, True, []
        try:
            with self._precise(), draws.first():
                yield
        finally:
            self._watching = False
            self.unkeyed |= draws.unkeyed

    def forget(self) -> None:
        """The newest microbatch was none: no backward came."""
        self.evaluation_draws += len(self._draws.pop().log)
        self.outputs = [output for output in self.outputs if output.microbatch < len(self._draws)]

    @contextlib.contextmanager
    def backward(self) -> Iterator[None]:
        """The backward of the newest microbatch: what it recomputes is lifted and keyed alike."""
        self.ready.clear()
        self._look_for_touched()
        drawn = len(self._draws[-1].log)
        with lifted() if self._lift else contextlib.nullcontext(), self._draws[-1].again():
            yield
        # What runs again and draws the same numbers as at first is the same call, and not noted again.
        self.redrawn = self.redrawn or len(self._draws[-1].log) > drawn
        self._left = _norms(self._model)

    def _look_for_touched(self) -> None:
        """Were gradients changed since the last backward of this step?"""
        if self._left is None:
            return
        now = _norms(self._model)
        ratios = [now.get(name, 0.0) / norm for name, norm in self._left.items() if norm > 0]
        if ratios and max(abs(ratio - 1) for ratio in ratios) > 1e-12:
            alike = max(ratios) - min(ratios) <= 1e-9 * max(ratios)
            sizes = [math.hypot(*norms.values()) for norms in (self._left, now)]
            self.touched.append((len(self._draws) - 2, sizes[0], sizes[1], alike))

    def lifted(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """A function of the job, its casts lifted, unwatched."""

        def precise(*args: Any) -> Any:
            with self._precise():
                return function(*args)

        return precise

    def measured(self, function: Callable[..., Any], rows: Sequence[Rows]) -> Callable[..., Any]:
        """What a job evaluates with, its casts lifted and its draws keyed; called once for each of `rows`."""
        batches = iter(enumerate(rows))

        def keyed(*args: Any) -> Any:
            number, own = next(batches)
            draws = KeyedDraws((self._seed, -1, number), own, by_rows(own))
            with self._precise(), draws.first():
                result = function(*args)
            self.unkeyed |= draws.unkeyed
            self.evaluation_draws += len(draws.log)
            return result

        return keyed

    def _precise(self) -> contextlib.AbstractContextManager[None]:
        return lifted() if self._lift else contextlib.nullcontext()

    def _ready_hook(self, name: str) -> Callable[[Tensor], None]:
        return lambda _: self.ready.append(name)

    def _entered(self, module: nn.Module, inputs: Any) -> None:
        if self._watching:
            self._inside.append([self._drawn(), 0])

    def _hook(self, name: str, kind: str) -> Callable[[nn.Module, Any, Any], None]:
        def seen(module: nn.Module, inputs: Any, output: Any) -> None:
            if not self._watching:
                return
            self._drew(name)
            micro = len(self._draws) - 1
            rows = self._rows[micro]
            for tensor in tensors_in(output):
                if tensor.is_floating_point():
                    number = self._numbers[name] = self._numbers.get(name, -1) + 1
                    with without_interception():  # selective recomputation counts the operators of a block
                        value = full_tensor(tensor.detach())
                        prints = prints_of(value, rows.count)
                    counts = rows.samples > 0
                    self.outputs.append(
                        Output(
                            micro,
                            name,
                            kind,
                            number,
                            (tuple(value.shape),) if counts else (),
                            (rows.count,) if counts else (),
                            {layout: (p,) if counts else () for layout, p in prints.items()},
                        )
                    )

        return seen

    def _drawn(self) -> int:
        """Draws of this microbatch so far; of those that cannot be keyed, kinds."""
        return len(self._draws[-1].log) + len(self._draws[-1].unkeyed)

    def _drew(self, name: str) -> None:
        """A module's call ends: did it draw more than the modules inside it?"""
        if not self._inside:
            return
        before, below = self._inside.pop()
        drawn = self._drawn() - before
        if drawn > below:
            self.drawing.add(name)
        if self._inside:
            self._inside[-1][1] += drawn


def merged(ranks: Sequence[Sequence[Output]]) -> list[Output]:
    """The outputs of all ranks, each call with the prints of the ranks that had samples, in rank order."""
    found: dict[tuple[int, str, int], list[Output]] = {}
    for outputs in ranks:
        for output in outputs:
            found.setdefault(output.key, []).append(output)
    return [
        Output(
            calls[0].microbatch,
            calls[0].module,
            calls[0].kind,
            calls[0].number,
            tuple(shape for call in calls for shape in call.shapes),
            tuple(rows for call in calls for rows in call.rows),
            {
                layout: tuple(p for call in calls for p in call.prints.get(layout, ()))
                for layout in {layout for call in calls for layout in call.prints}
            },
        )
        for calls in found.values()
    ]


def clean(name: str) -> str:
    """A module's or parameter's name, as the user wrote the model."""
    for wrapper in WRAPPERS:
        name = name.replace(wrapper, "")
    return name


def named_parameters(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """The parameters that are trained, each once: where a block has stayed gathered, the part that it was made from."""
    parts = {}
    for _, module in sharded_modules(model):
        for group in groups_of(module):
            parts.update(group.made_from())
    for name, p in model.named_parameters():
        yield clean(name), parts.get(id(p), p)


def parameters_of(model: nn.Module) -> Named:
    """Copies of the parameters, each once. Collective where they are sharded."""
    return {name: plain(full_tensor(p)) for name, p in named_parameters(model)}


def buffers_of(model: nn.Module) -> Named:
    """Copies of the buffers."""
    return {clean(name): plain(full_tensor(b)) for name, b in model.named_buffers()}


def gradients_of(model: nn.Module) -> Named:
    """Copies of the gradients that there are. Collective where they are sharded."""
    return {name: plain(full_tensor(p.grad)) for name, p in named_parameters(model) if p.grad is not None}


def _norms(model: nn.Module) -> dict[str, float]:
    """The length of each gradient that this rank has, or of its part of it."""
    found = {}
    for name, p in named_parameters(model):
        if p.grad is not None:
            own = p.grad.to_local() if isinstance(p.grad, DTensor) else p.grad
            found[name] = float(own.norm())
    return found


def tied_in(model: nn.Module) -> list[tuple[str, ...]]:
    """Groups of names that are one parameter."""
    names: dict[int, list[str]] = {}
    for name, p in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(p), []).append(clean(name))
    return sorted(tuple(sorted(group)) for group in names.values() if len(group) > 1)


def optimizer_state_of(optimizer: Optimizer, model: nn.Module) -> dict[str, Named]:
    """Copies of the optimizer's tensors by parameter; what is not the model's is named `stranger N`."""
    names = {id(p): name for name, p in named_parameters(model)}
    found: dict[str, Named] = {}
    for number, p in enumerate(p for group in optimizer.param_groups for p in group["params"]):
        state = optimizer.state.get(p, {})
        tensors = {key: plain(full_tensor(value)) for key, value in state.items() if isinstance(value, Tensor)}
        if tensors:
            found[names.get(id(p), f"stranger {number}")] = tensors
    return found


def rates_of(optimizer: Optimizer) -> list[float]:
    """The learning rate of each group."""
    return [float(group["lr"]) for group in optimizer.param_groups if "lr" in group]


def scheduler_numbers(scheduler: Any) -> dict[str, float]:
    """The numbers of a scheduler's state."""
    if scheduler is None:
        return {}
    state = scheduler.state_dict()
    return {k: float(v) for k, v in state.items() if isinstance(v, int | float) and not isinstance(v, bool)}
