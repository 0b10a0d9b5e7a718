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

import torch
from torch import Tensor

from meshwise import parallel
from meshwise.records import folder as names
from meshwise.records.files import append_lines
from meshwise.reports.recorder import Mark, Recorder
from meshwise.spec.faults import Fault
from meshwise.torch_compat.sharding import local_of
from meshwise.workers.environment import ATTEMPT


class InjectedFault(RuntimeError):
    """Raised by `--fault raise`."""


_armed: tuple[Sequence[Fault], Path | None] = (), None
_happened: dict[Fault, int] = {}
"""The step in which a fault last happened. Only `slow` happens in more than one."""


def arm(faults: Sequence[Fault], rank: int, folder: Path | None) -> None:
    """Choose the faults that will be injected in this process: the faults of rank `rank`.

    folder: the run folder, in which each injected fault is recorded.
    """
    global _armed
    _armed = [fault for fault in faults if fault.rank == rank], folder
    _happened.clear()


def watch(recorder: Recorder) -> None:
    """Make `recorder` inject the faults that `arm` has chosen for this process. Without faults, it stays unchanged."""
    if _armed[0]:
        phase = recorder.__dict__.pop("phase")
        recorder.__class__ = FaultyRecorder
        vars(recorder)["_phase"] = phase


class FaultyRecorder(Recorder):
    """A recorder that injects a fault when the rank enters the step and the phase that the fault names."""

    _phase: str

    @property
    def phase(self) -> str:
        """The current phase of the step on this rank, such as `data`, `forward` or `optimizer`."""
        return self._phase

    @phase.setter
    def phase(self, phase: str) -> None:
        self._phase = phase
        self._phase_begins(phase, self.step + (phase == "data"))

    def arrive(self) -> int:
        self._phase_begins("communication", self.step)
        return super().arrive()

    def begin_collective(self, name: str) -> tuple[int, int, Mark]:
        self._phase_begins("communication", self.step)
        return super().begin_collective(name)

    def _phase_begins(self, phase: str, step: int) -> None:
        faults, folder = _armed
        for fault in faults:
            reached = step >= fault.step if fault.kind == "slow" else step == fault.step
            if fault.phase != phase or not reached or _happened.get(fault) == step:
                continue
            if fault not in _happened and folder is not None:
                fact = {"fault": str(fault), "attempt": int(os.environ.get(ATTEMPT, "1")), "time": time.time()}
                with contextlib.suppress(OSError):  # the folder is gone, or its disk full
                    append_lines(folder / names.FAULTS, [fact])
            _happened[fault] = step
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
            raise InjectedFault(f"raised by --fault {fault}")
        case "oom":
            raise torch.OutOfMemoryError(f"out of memory, simulated by --fault {fault}")
        case "hang":
            while True:
                time.sleep(1.0)
        case _:
            _spoil(fault.kind, [p for p in parameters if not parallel.holding.is_absent(p)])


def _spoil(kind: str, parameters: Iterable[Tensor]) -> None:
    part = next(t for p in parameters if (t := local_of(p.detach())).numel() and t.is_floating_point())
    first = part.as_strided((1,), (1,))
    if kind == "nan":
        first.fill_(float("nan"))
    else:  # a bit of the mantissa: the value changes, and stays finite
        first.view(torch.uint8)[part.element_size() - 2] ^= 0x08
