"""Inject this rank's faults (`--fault`) when their phases begin.

The launcher passes the faults with the task, never through the environment or a plan. Each fault is recorded in the run
folder just before it happens, so it is also known which faults did not happen. Without faults, this costs nothing.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from meshwise import parallel
from meshwise.records import folder as names
from meshwise.records.files import append_lines
from meshwise.reports.recorder import Recorder
from meshwise.spec.faults import Fault
from meshwise.torch_compat.sharding import local_of
from meshwise.workers.environment import ATTEMPT

_armed: dict[Fault, int] = {}
"""The faults of this rank, and the step in which each last happened, or 0. Only `slow` happens in several steps."""
_folder: Path | None = None


def arm(faults: Sequence[Fault], rank: int, folder: Path | None) -> None:
    """Choose the faults that will be injected in this process: the faults of rank `rank`.

    folder: the run folder, in which each injected fault is recorded.
    """
    global _folder
    _folder = folder
    _armed.clear()
    _armed.update({fault: 0 for fault in faults if fault.rank == rank})


def watch(recorder: Recorder) -> None:
    """Make `recorder` inject the faults that `arm` has chosen for this process, if any."""
    if _armed:
        recorder.__class__ = FaultyRecorder


class FaultyRecorder(Recorder):
    """A recorder that injects a fault when the rank enters the step and the phase that the fault names."""

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if name == "phase":
            self._phase_begins(value, self.step + (value == "data"))
        elif name == "_collectives":
            self._phase_begins("communication", self.step)

    def _phase_begins(self, phase: str, step: int) -> None:
        for fault, last in _armed.items():
            reached = step >= fault.step if fault.kind == "slow" else step == fault.step
            if fault.phase != phase or not reached or last == step:
                continue
            if not last and _folder is not None:
                fact = {"fault": str(fault), "attempt": int(os.environ.get(ATTEMPT, "1")), "time": time.time()}
                with contextlib.suppress(OSError):  # the folder may be gone, or its disk full
                    append_lines(_folder / names.FAULTS, [fact])
            _armed[fault] = step
            _inject(fault, self.parameters().values())


def _inject(fault: Fault, parameters: Iterable[Tensor]) -> None:
    match fault.kind:
        case "slow":
            time.sleep(fault.seconds)
        case "kill" | "lost":
            os.kill(os.getpid(), signal.SIGKILL)
        case "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        case "exit":
            os._exit(1)
        case "raise":
            raise RuntimeError(f"raised by --fault {fault}")
        case "oom":
            raise torch.OutOfMemoryError(f"out of memory, simulated by --fault {fault}")
        case "hang":
            while True:
                time.sleep(1.0)
        case _:
            held = (local_of(p.detach()) for p in parameters if not parallel.holding.is_absent(p))
            part = next(tensor for tensor in held if tensor.numel() and tensor.is_floating_point())
            first = part.as_strided((1,), (1,))
            if fault.kind == "nan":
                first.fill_(float("nan"))
            else:  # flip a bit of the mantissa: the value changes, and stays finite
                first.view(torch.uint8)[part.element_size() - 2] ^= 0x08
