"""Reject uses of parameter shards that would fail or be wrong.

Each error message gives the reason.
"""

from __future__ import annotations

import functools
import re
import traceback
import weakref
from collections.abc import Sequence
from typing import Any

from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import LBFGS, Optimizer

from meshwise.parallel.probe_optimizer import unlike_by_parameters, unlike_on_parts
from meshwise.parallel.shard_units import AGAIN
from meshwise.parallel.step_hooks import held_parameters
from meshwise.parallel.technique import SKIPPED
from meshwise.spec.errors import PlanError
from meshwise.torch_compat.dispatch import rehearsing
from meshwise.torch_compat.modules import takes_hooks
from meshwise.torch_compat.sharding import Group
from meshwise.transfer import collectives
from meshwise.transfer.reading import agree, meet, someone_is_past

_tried: weakref.WeakSet[Optimizer] = weakref.WeakSet()  # optimizers that were found to step parts like whole parameters
COPIED = (
    "Make a copy of the model (such as an EMA) before mw.distribute, and pass both models, so that both are divided "
    "alike: mw.distribute(model, ema, optimizer, loader)."
)
OF_ANOTHER = (
    "{here}: rank {rank} calls mw.backward for a loss without a forward of the model, and {other}. All ranks gather "
    "sharded parameters together. Run the model on every rank in each step, and keep its output in the loss, for "
    "example as loss + 0 * output.sum()."
)


def add_advice(error: BaseException) -> None:
    """Add advice to an error that torch raised because code uses parameter shards or copies a sharded model."""
    text = str(error)
    if "FSDP does not support deepcopy" in text:
        error.add_note(f"A sharded model cannot be copied. {COPIED}")
    if "out of bounds for storage of size 0" in text:
        error.add_note(AGAIN)
    through = "".join(frame.filename for frame in traceback.extract_tb(error.__traceback__))
    if isinstance(error, RuntimeError) and "torch/nn/utils/prune.py" in through:
        error.add_note("Parameters that ranks hold in parts cannot be pruned. Prune the model before mw.distribute.")
    if "Sharding propagation failed" in text:
        error.add_note(
            "Outside of model(x), each rank has only a part of a divided parameter p. p.full_tensor() returns the "
            "whole parameter, and every rank must call it."
        )
    if not isinstance(error, RuntimeError) or "DTensor" not in text:
        return
    if "torch/optim/" in through.replace("torch/optim/swa_utils.py", ""):  # swa_utils has no optimizers
        error.add_note(
            "This optimizer cannot step parameters of which each rank has only a part. Use another optimizer, or data "
            "alone, such as --set zero1=true."
        )
    elif re.search(r"aten\.\w+_\.\w+ got mixed", text):  # the error of an in-place write
        error.add_note(f"This in-place operator mixes a sharded parameter with a whole tensor. {COPIED}")
    elif "mixed torch.Tensor and DTensor" in text:
        error.add_note(
            "Sharded parameters are gathered only during model(x), but this code calls another method or a single "
            "layer. Call it from the model's forward (with an argument that selects it), or use data alone, such as "
            "--set zero1=true."
        )


def check_steps_on_parts(optimizer: Optimizer) -> None:
    """Raise PlanError for an optimizer that may make a wrong step on parameter shards, or that may fail on them."""
    if optimizer in _tried:
        return
    name, divided = type(optimizer).__name__, any(isinstance(p, DTensor) for p in held_parameters(optimizer))
    if isinstance(optimizer, LBFGS):
        why = "it computes over one vector of all parameters"
    elif takes_hooks(optimizer):
        why = unlike_on_parts(optimizer) if divided else ""
    else:
        why = "it wraps another optimizer, and is not a torch optimizer itself"
    if why:
        alone = isinstance(optimizer, LBFGS) or not takes_hooks(optimizer) or unlike_by_parameters(optimizer)
        raise PlanError(
            f"shard: {name} may compute different values if each rank has only a part of every parameter: {why}. Use "
            f"another optimizer, or only data parallelism{'' if alone else ', such as --set zero1=true'}."
        )
    if divided:
        _tried.add(optimizer)


def meet_without_forward(groups: Sequence[Group]) -> None:
    """Make sure that all ranks call mw.backward now, if this rank has run no forward since its last backward."""
    if groups and not any(group.ran for group in groups):
        meet("a loss", OF_ANOTHER)


FIRST = 1800.0  # seconds for all ranks to reach the blocks of the first forward, which may compile
GRACE = 60.0  # the same for a later forward that runs blocks in a new order


class GatherOrder:
    """Checks that all ranks gather the parameters of `blocks` in the same order. Otherwise, a rank could wait forever
    in a gather that other ranks skip. The check runs in hooks on the forwards of `root` and of the blocks, and raises
    PlanError if the orders differ."""

    def __init__(self, root: nn.Module, blocks: Sequence[nn.Module], key: str) -> None:
        names = {id(module): name for name, module in root.named_modules()}
        self._key, self._names = key, [names[id(block)] for block in blocks]
        self._known = set[int]()
        self._so_far = self._passed = self._asked = 0
        self._runs = self._met = False
        root.register_forward_pre_hook(self._begin, prepend=True)
        for number, block in enumerate(blocks):
            block.register_forward_pre_hook(functools.partial(self._come, number), prepend=True)
        root.register_forward_hook(self._end, prepend=True)

    def _begin(self, *unused: Any) -> None:
        self._runs, self._so_far, self._passed = not rehearsing(), 0, 0

    def _end(self, *unused: Any) -> None:
        if self._runs:
            self._come(-1)
        self._runs, self._met = False, True

    def _come(self, number: int, *unused: Any) -> None:
        """Check that all ranks are about to gather the same block in their forwards."""
        if not self._runs:
            return
        self._so_far = hash((self._so_far, number))
        if self._so_far not in self._known:
            self._agree(f"calls block {self._names[number]}" if number >= 0 else "ends")
            self._known.add(self._so_far)
        self._passed += 1

    def _agree(self, what: str) -> None:
        self._asked += 1
        what = f"{what} after {self._passed} blocks"
        key, grace = f"{self._key}/{self._asked}", GRACE if self._met else FIRST
        other = agree(key, what, collectives.world_size(), grace, someone_is_past)
        if other is not None:
            others = f"the forward of another rank {other}" if other else "the forwards of other ranks do not"
            raise PlanError(
                f"shard: the forward of this rank {what}, but {others}. All ranks must run the same blocks "
                "in the same order. Put modules that a rank may skip into a list named experts, because a list of "
                f"this name is gathered with the whole model, or use data parallelism (shard=1). {SKIPPED}"
            )
