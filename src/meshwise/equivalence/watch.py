"""Watch a model while it trains: what each module gave, which draws it made, when gradients were ready, what is left.

A module's output is kept as prints: each sample's row, projected on a few fixed random directions. The length of a
print is about the length of its row, and that of a difference of prints about that of the difference of the rows, at a
thousandth of the memory; ranks send prints, and the prints of the ranks together are those of one device.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from meshwise.compat.dispatch import operators_unseen, tensors_in
from meshwise.equivalence.lifted import lifted
from meshwise.equivalence.seen import Named, Output, plain
from meshwise.training.keyed import Draw, KeyedDraws, Rows, by_reference, keyed_normal, on_one_device
from meshwise.transfer.layout import whole

DIRECTIONS = 8
LONGEST = 4096  # values that are projected together; a longer row has a print for each such piece
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
        self.outputs: list[Output] = []
        self.ready: list[str] = []
        self.unkeyed: set[str] = set()
        for name, module in model.named_modules():
            module.register_forward_hook(self._hook(clean(name), type(module).__name__))
        for name, p in model.named_parameters():
            if p.requires_grad:
                p.register_post_accumulate_grad_hook(self._ready_hook(clean(name)))

    def begin(self, step: int, rows: Sequence[Rows], reference: Sequence[Sequence[Draw]] | None = None) -> None:
        """A step begins: its rows and, on the side that follows, the draws of one device, an entry a microbatch."""
        self._step, self._rows, self._reference = step, rows, reference
        self._draws, self.outputs, self.ready = [], [], []

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
        self._numbers, self._watching = {}, True
        try:
            with self._precise(), draws.first():
                yield
        finally:
            self._watching = False
            self.unkeyed |= draws.unkeyed

    def forget(self) -> None:
        """The newest microbatch was none: no backward came."""
        self._draws.pop()
        self.outputs = [output for output in self.outputs if output.microbatch < len(self._draws)]

    @contextlib.contextmanager
    def backward(self) -> Iterator[None]:
        """The backward of the newest microbatch: what it recomputes is lifted and keyed alike."""
        self.ready.clear()
        with lifted() if self._lift else contextlib.nullcontext(), self._draws[-1].again():
            yield

    def lifted(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """A function of the job, its casts lifted, unwatched."""

        def precise(*args: Any) -> Any:
            with self._precise():
                return function(*args)

        return precise

    def _precise(self) -> contextlib.AbstractContextManager[None]:
        return lifted() if self._lift else contextlib.nullcontext()

    def _ready_hook(self, name: str) -> Callable[[Tensor], None]:
        return lambda _: self.ready.append(name)

    def _hook(self, name: str, kind: str) -> Callable[[nn.Module, Any, Any], None]:
        def seen(module: nn.Module, inputs: Any, output: Any) -> None:
            if not self._watching:
                return
            micro = len(self._draws) - 1
            rows = self._rows[micro]
            for tensor in tensors_in(output):
                if tensor.is_floating_point():
                    number = self._numbers[name] = self._numbers.get(name, -1) + 1
                    with operators_unseen():  # selective recomputation counts the operators of a block
                        value = whole(tensor.detach())
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


def prints_of(value: Tensor, rows: int) -> dict[str, Tensor]:
    """Prints of a tensor in every layout that it may have: `0` and `1` for the dim of the batch, `each` for samples and
    positions in them (samples, positions, ...), `whole`."""
    found = {"whole": _print(value.reshape(1, -1))}
    if value.dim() > 0 and value.shape[0] % rows == 0:
        found["0"] = _print(value.reshape(rows, -1))
    if value.dim() > 1 and value.shape[1] % rows == 0:
        found["1"] = _print(value.transpose(0, 1).reshape(rows, -1))
    if value.dim() > 1 and value.shape[0] == rows:
        found["each"] = _print(value.reshape(rows * value.shape[1], -1)).unflatten(0, (rows, value.shape[1]))
    return found


def _print(rows: Tensor) -> Tensor:
    if rows.numel() == 0:
        return torch.zeros(len(rows), DIRECTIONS, dtype=torch.float64)
    if rows.shape[1] > LONGEST:
        rows = nn.functional.pad(rows, (0, -rows.shape[1] % LONGEST)).unflatten(1, (-1, LONGEST))
    return (rows.to(torch.float64) @ _directions(rows.shape[-1], rows.device.type)).flatten(1).cpu()


@lru_cache(maxsize=256)
def _directions(size: int, device: str) -> Tensor:
    made = keyed_normal(size, (size, DIRECTIONS), torch.device("cpu")) / math.sqrt(DIRECTIONS)
    return made.to(device)


def clean(name: str) -> str:
    """A module's or parameter's name, as the user wrote the model."""
    for wrapper in WRAPPERS:
        name = name.replace(wrapper, "")
    return name


def parameters_of(model: nn.Module) -> Named:
    """Copies of the parameters, each once. Collective where they are sharded."""
    return {clean(name): plain(whole(p)) for name, p in model.named_parameters()}


def buffers_of(model: nn.Module) -> Named:
    """Copies of the buffers."""
    return {clean(name): plain(whole(b)) for name, b in model.named_buffers()}


def gradients_of(model: nn.Module) -> Named:
    """Copies of the gradients that there are. Collective where they are sharded."""
    return {clean(name): plain(whole(p.grad)) for name, p in model.named_parameters() if p.grad is not None}


def tied_in(model: nn.Module) -> list[tuple[str, ...]]:
    """Groups of names that are one parameter."""
    names: dict[int, list[str]] = {}
    for name, p in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(p), []).append(clean(name))
    return sorted(tuple(sorted(group)) for group in names.values() if len(group) > 1)


def optimizer_state_of(optimizer: Optimizer, model: nn.Module) -> dict[str, Named]:
    """Copies of the optimizer's tensors by parameter; what is not the model's is named `stranger N`."""
    names = {id(p): clean(name) for name, p in model.named_parameters()}
    found: dict[str, Named] = {}
    for number, p in enumerate(p for group in optimizer.param_groups for p in group["params"]):
        state = optimizer.state.get(p, {})
        tensors = {key: plain(whole(value)) for key, value in state.items() if isinstance(value, Tensor)}
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
