"""What one device of ours draws under `--exact-random`, for plain python: does it then train the same?

`foreign.py` copies this file beside a script. `begin` records what is drawn from the first `mw.distribute` on; as
`meshwise.py`, where no meshwise is, it stands for the verbs in plain PyTorch, and a draw is the recorded one.
"""

from __future__ import annotations

import atexit
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

TAPE = Path("tape")
OF_LOADERS = ("randperm", "random_")  # orders and seeds of loaders: of the program's own stream, as in plain python


def _is_drawn(func: Any, kwargs: dict[str, Any]) -> bool:
    name = func.overloadpacket.__name__
    draws = torch.Tag.nondeterministic_seeded in func.tags or name in ("native_dropout", "bernoulli_", "normal_")
    return draws and name not in OF_LOADERS and kwargs.get("generator") is None


class _Recorded(TorchDispatchMode):
    """Keeps draws from torch's generator."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before = torch.get_rng_state()
        result = func(*args, **(kwargs or {}))
        return result if _keying else _kept(func, kwargs or {}, result, before)


class _Replayed(TorchDispatchMode):
    """Draws what is on the tape."""

    def __init__(self, tape: list[Any]) -> None:
        super().__init__()
        self._tape = tape

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not _is_drawn(func, kwargs or {}):
            return func(*args, **(kwargs or {}))
        name, drawn, before = self._tape.pop(0)
        if before is not None and torch.equal(before, torch.get_rng_state()):  # the program's own stream goes on
            return func(*args, **(kwargs or {}))
        if name != func.overloadpacket.__name__:
            raise RuntimeError(f"the tape has {name}, the program draws {func}")
        if name == "native_dropout":  # the mask alone is drawn
            scale = 0.0 if args[1] == 1 else 1 / (1 - args[1])
            return args[0] * drawn[1] * scale, drawn[1]
        return args[0].copy_(drawn) if name.endswith("_") else drawn


def _kept(func: Any, kwargs: dict[str, Any], result: Any, before: Any = None) -> Any:
    if _is_drawn(func, kwargs):
        values = [each.detach() for each in result] if isinstance(result, tuple) else result.detach()
        with TAPE.open("ab") as file:
            pickle.dump((func.overloadpacket.__name__, values, before), file)
    return result


def _draws() -> Iterator[Any]:
    with TAPE.open("rb") as file:
        while file.peek(1):
            yield pickle.load(file)


def begin() -> None:
    """Record, of a program with meshwise."""
    import meshwise
    from meshwise.data.keyed import KeyedDraws

    handle, distribute = KeyedDraws._handle, meshwise.distribute

    def handled(draws: Any, func: Any, args: Any, kwargs: Any) -> Any:
        _keying.append(func)  # which draws the number of a call itself
        result = handle(draws, func, args, kwargs)
        _keying.clear()
        return _kept(func, kwargs, result)

    def begun(*things: Any, **settings: Any) -> Any:
        result = distribute(*things, **settings)
        if not _on:
            _on.append(_Recorded().__enter__())
        return result

    KeyedDraws._handle, meshwise.distribute = handled, begun


def _given(*things: Any, **_: Any) -> Any:
    return things[0] if len(things) == 1 else things


def distribute(*things: Any) -> Any:
    """Nothing; from the first on, draws are those of the tape."""
    if not _on:
        tape = list(_draws())
        _on.append(_Replayed(tape).__enter__())
        atexit.register(lambda: print(f"draws left {len(tape)}"))
    return _given(*things)


def backward(loss: Any, **_: Any) -> Any:
    """Of plain PyTorch."""
    loss.backward()
    return loss.detach()


_on: list[Any] = []
_keying: list[Any] = []
sum = mean = split = _given
save, print = torch.save, print
