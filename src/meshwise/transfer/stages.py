"""Define the stages of a pipeline, and what each stage lacks.

The stages are ranks that each hold a part of a model's layers and work on the same samples.

`lacks` returns the names of the parameters and buffers that a rank does not hold. The first stage that holds such a
parameter or buffer provides its value. Along with the activations, stages send state that changes during a forward pass
(`carried`), such as the number of random draws.
"""

from __future__ import annotations

import contextlib
import pickle
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from meshwise.torch_compat.collectives import Group
from meshwise.transfer import collectives


@dataclass(frozen=True)
class Pipe:
    """The pipeline to which this rank belongs: the ranks that together hold all stages of one replica.

    rank, size: this rank's number in the pipeline, and the number of ranks in the pipeline.
    down, up: two process groups of the pipeline's ranks. `down` is for sends to a higher rank, `up` for sends to a
    lower rank. Two ranks that send to each other at the same time therefore use different groups, and do not block.
    """

    rank: int
    size: int
    group: Group
    down: Group
    up: Group
    same_stage: tuple[int, ...] = ()
    """The ranks of the run, in all pipelines, that hold the same stages as this rank."""

    def towards(self, source: int, target: int) -> Group:
        """Return the group in which rank `source` sends to rank `target`."""
        return self.down if target > source else self.up


Mail = dict[tuple[int, int], list[bytes]]
"""Pickled objects that simulated ranks have sent to each other, by (source rank, target rank)."""
_mail: list[Mail] = []
_pipe: list[Pipe | None] = [None]
_lacks: weakref.WeakKeyDictionary[nn.Module, set[str]] = weakref.WeakKeyDictionary()
_carried: list[tuple[Callable[[], Any], Callable[[Any], None]]] = []
_in_own_layers: list[bool] = [True]
_left: list[nn.Module | None] = [None]  # the last layer of this stage, once it has run


def pipe() -> Pipe | None:
    """Return the pipeline that this rank is in. None if it is in no pipeline."""
    return _pipe[0]


def join_pipe(found: Pipe | None) -> None:
    """Set the pipeline that this rank is in from now on. None means no pipeline."""
    _pipe[0] = found
    enter_own_layers(True)


def lacks(model: nn.Module) -> set[str]:
    """Return the names of the parameters and buffers of `model` that only other stages hold."""
    return _lacks.get(model, set())


def absent_parameters(model: nn.Module) -> set[nn.Parameter]:
    """Return the parameters of `model` that only other stages hold."""
    names = lacks(model)
    return {p for name, p in model.named_parameters(remove_duplicate=False) if name in names}


def now_lacks(model: nn.Module, names: set[str]) -> None:
    """Record that only other stages hold these parameters and buffers of `model`."""
    _lacks[model] = names


def counts(module: nn.Module | None = None) -> bool:
    """Return whether the output of `module`, which has just run, is the same as in a run on one device.

    In a pipeline, only the layers of this rank's stage have such outputs. A rank also runs the code before and after
    its layers, but the results are wrong there.
    """
    return _in_own_layers[0] and _left[0] in (None, module)


def enter_own_layers(inside: bool) -> None:
    """Record whether the forward is now inside the layers of this rank's stage."""
    _in_own_layers[0], _left[0] = inside, None


def leave_own_layers(last: nn.Module) -> None:
    """Record that the forward has passed `last`, the last layer of this rank's stage."""
    _left[0] = last


@contextlib.contextmanager
def carried(leave: Callable[[], Any], enter: Callable[[Any], None]) -> Iterator[None]:
    """Inside the `with` block, send a state along with the activations from each stage to the next.

    leave: called after a stage's layers. Returns the state to send.
    enter: called in the next stage with the received state.
    """
    _carried.append((leave, enter))
    try:
        yield
    finally:
        _carried.pop()


def take_along() -> list[Any]:
    """Return the states that this stage sends to the next stage, along with the activations.

    There is one state for each open `with carried(leave, enter)`: the result of `leave`.
    """
    return [leave() for leave, _ in _carried]


def put_down(values: list[Any]) -> None:
    """Take over the states that the previous stage has sent along with the activations.

    values: one state for each open `with carried(leave, enter)`, to be passed to `enter`.
    """
    for (_, enter), value in zip(_carried, values, strict=True):
        enter(value)


@contextlib.contextmanager
def kept(mail: Mail) -> Iterator[None]:
    """Inside the `with` block, keep objects that are sent in `mail` until they are received.

    This is for one process that runs all ranks one after the other.
    """
    _mail.append(mail)
    try:
        yield
    finally:
        _mail.pop()


def pass_on(mail: Mail, way: tuple[int, int, int], change: Callable[[Any], Any]) -> None:
    """Pass on what was sent to a simulated rank that does not run.

    way: the rank that has sent it, the rank that does not run, and the next rank.
    change: takes what was sent, and returns what the next rank receives.
    """
    source, through, target = way
    mail[through, target] = [pickle.dumps(change(pickle.loads(each))) for each in mail.pop((source, through), [])]


def _own() -> int:
    return collectives.get_rank(collectives.everyone())


def send_object(value: Any, target: int, group: Group) -> Callable[[], None]:
    """Begin to send any value that pickle accepts. Returns a function that waits until the value is sent."""
    if _mail:
        _mail[-1].setdefault((_own(), collectives.ranks_of(group)[target]), []).append(pickle.dumps(value))
        return lambda: None
    data = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
    device = collectives.device_of(group)
    size = torch.tensor([len(data)], device=device)
    begun = [collectives.begin_send(part, target, group) for part in (size, data.to(device))]

    def wait() -> None:
        for each in begun:
            each()

    return wait


def receive_object(source: int, group: Group) -> Any:
    """Receive an object that rank `source` sends with `send_object`, and return it."""
    if _mail:
        return pickle.loads(_mail[-1][collectives.ranks_of(group)[source], _own()].pop(0))
    device = collectives.device_of(group)
    size = collectives.receive(torch.zeros(1, dtype=torch.int64, device=device), source, group)
    data = torch.empty(int(size), dtype=torch.uint8, device=device)
    return pickle.loads(collectives.receive(data, source, group).cpu().numpy().tobytes())
