"""Import every module of ours, one after the other, in a process that has done nothing else.

    python -m tests.every_import cuda     torch's CUDA wheel: after each room a child is forked, and asked whether CUDA
                                          would refuse it
    python -m tests.every_import calls    any torch: whoever asks for a device meanwhile is shown, the fork server too

Exits with 1 where a module spoils the forks that follow. One process is enough: what spoils them stays.
"""

from __future__ import annotations

import importlib
import itertools
import os
import socket
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import torch

import meshwise

FIRST = ("meshwise.training.script.distribute", "meshwise.training.job.loop", "torch._dynamo")
"""What the fork server imports, in its order: see PRELOAD."""


def modules() -> list[str]:
    """Every module of ours, those that the fork server imports before all others."""
    root = Path(str(meshwise.__file__)).parent
    paths = (path.relative_to(root.parent).with_suffix("") for path in sorted(root.rglob("*.py")))
    return [*FIRST, *(".".join(path.parts).removesuffix(".__init__") for path in paths)]


def spoilt() -> bool:
    """Whether CUDA would refuse a child that is forked now."""
    child = os.fork()
    if child == 0:
        os._exit(torch.cuda._is_in_bad_fork())
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) != 0


def refuse(name: str) -> Callable[..., NoReturn]:
    """What stands for a call that spoils forks, where a machine has CUDA."""

    def call(*_: Any, **__: Any) -> NoReturn:
        print(f"{name} is called:\n" + "".join(traceback.format_stack()[:-1]), flush=True)
        os._exit(1)

    return call


def stand_in() -> None:
    """Let every call that asks for a device, or for how many there are, fail. They are those of torch's Python side,
    through which its own modules go too."""
    asked = ("is_available", "device_count", "init", "_lazy_init", "is_bf16_supported")
    for module, names in ((torch.cuda, asked), (torch.xpu, asked[:4]), (torch.accelerator, torch.accelerator.__all__)):
        for name in names:
            if isinstance(getattr(module, name), type):  # such as torch.accelerator.device_index
                continue
            setattr(module, name, refuse(f"{module.__name__}.{name}"))
    for name in dir(torch._C):
        if name.startswith(("_accelerator_", "_get_accelerator", "_cuda_getDevice", "_cuda_init")):
            setattr(torch._C, name, refuse(f"torch._C.{name}"))


def serve_nobody() -> None:
    """The life of a fork server whose launcher is gone at once."""
    from meshwise.training.job.options import PRELOAD
    from meshwise.workers.__main__ import _serve

    assert PRELOAD == FIRST
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.close()
    assert _serve(theirs.detach(), PRELOAD) == 0


def main(how: str) -> int:
    if how == "calls":
        stand_in()
    elif spoilt():
        print("`import torch` alone spoils forks")
        return 1
    for room, names in itertools.groupby(modules(), lambda name: name.split(".")[:2]):
        for name in names:
            importlib.import_module(name)
        if how == "cuda" and spoilt():
            print(f"a module of {'.'.join(room)} spoils forks; `calls` instead of `cuda` shows which line")
            return 1
    serve_nobody()
    print(f"{len(modules())} modules")
    return int(how == "cuda" and spoilt())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
