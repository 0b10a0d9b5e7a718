"""Define the stages of a pipeline, and what each one lacks.

They are ranks that each hold a part of a model's layers and work on the same samples.

What a rank lacks of a model is known by name (`lacks`): it is found on the first stage that has it. Beside the values
of a forward travels what followed the forward so far (`carried`): how many random numbers were drawn, for instance.

Tested in tests/parallel/test_pipeline.py.
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

from meshwise.compat.collectives import Group
from meshwise.transfer import collectives


@dataclass(frozen=True)
class Pipe:
    """The ranks of this pipeline, in the order of its stages.

    down, up: groups of the same ranks, for data to a higher and to a lower one. So each of two ranks only sends or only
    receives in a group, and neither waits for the other.
    """

    rank: int
    size: int
    group: Group
    down: Group
    up: Group
    same_stage: tuple[int, ...] = ()
    """The ranks of the run that have the same stages as this one, in all pipelines."""

    def towards(self, source: int, target: int) -> Group:
        """Return the group in which `source` sends to `target`."""
        return self.down if target > source else self.up


Mail = dict[tuple[int, int], list[bytes]]
"""Objects that ranks have sent to each other, pickled as between processes, by (from, to)."""
_mail: list[Mail] = []
_pipe: list[Pipe | None] = [None]
_lacks: weakref.WeakKeyDictionary[nn.Module, set[str]] = weakref.WeakKeyDictionary()
_carried: list[tuple[Callable[[], Any], Callable[[Any], None]]] = []
_in_own_layers: list[bool] = [True]
_left: list[nn.Module | None] = [None]  # the last of them, once it was run


def pipe() -> Pipe | None:
    """Return the pipeline that this rank is in."""
    return _pipe[0]


def join_pipe(found: Pipe | None) -> None:
    """Set the pipeline that this rank is in from now on, or None."""
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
    """From now on, treat these as held by other stages only."""
    _lacks[model] = names


def counts(module: nn.Module | None = None) -> bool:
    """Return whether the output of `module` is now that of one device: inside the layers of this rank's stage it is.
    Code behind the last of them belongs to the next stage, though this one runs it too."""
    return _in_own_layers[0] and _left[0] in (None, module)


def enter_own_layers(inside: bool) -> None:
    """Note that the forward has come to the layers of this rank, or begins or ends outside of them."""
    _in_own_layers[0], _left[0] = inside, None


def leave_own_layers(last: nn.Module) -> None:
    """Note that the forward has passed the last layer of this rank's stage."""
    _left[0] = last


@contextlib.contextmanager
def uncounted() -> Iterator[None]:
    """Ignore module outputs in the body: there the forward runs twice, or for other ranks."""
    before = _in_own_layers[0]
    _in_own_layers[0] = False
    try:
        yield
    finally:
        _in_own_layers[0] = before


@contextlib.contextmanager
def carried(leave: Callable[[], Any], enter: Callable[[Any], None]) -> Iterator[None]:
    """During the body, pass what `leave` returns at the end of a stage's layers to `enter` in the next stage."""
    _carried.append((leave, enter))
    try:
        yield
    finally:
        _carried.pop()


def take_along() -> list[Any]:
    """Collect the values that are sent along to the next stage."""
    return [leave() for leave, _ in _carried]


def put_down(values: list[Any]) -> None:
    """Restore the values that came along from the stage before."""
    for (_, enter), value in zip(_carried, values, strict=True):
        enter(value)


@contextlib.contextmanager
def kept(mail: Mail) -> Iterator[None]:
    """During the body, which runs one rank after the other in one process, keep objects in `mail` until their
    receiver's turn."""
    _mail.append(mail)
    try:
        yield
    finally:
        _mail.pop()


def _own() -> int:
    return collectives.get_rank(collectives.everyone())


def send_object(value: Any, target: int, group: Group) -> Callable[[], None]:
    """Begin to send any value that pickle accepts; the returned function waits for it."""
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
    """Receive an object that rank `source` sends with `send_object`."""
    if _mail:
        return pickle.loads(_mail[-1][collectives.ranks_of(group)[source], _own()].pop(0))
    device = collectives.device_of(group)
    size = collectives.receive(torch.zeros(1, dtype=torch.int64, device=device), source, group)
    data = torch.empty(int(size), dtype=torch.uint8, device=device)
    return pickle.loads(collectives.receive(data, source, group).cpu().numpy().tobytes())
