"""Inject this rank's faults (`--fault`) when its phases begin.

faults.py loads this file in a run with faults.

The launcher passes the faults with the task, never through the environment or a plan. Each fault is recorded in the run
folder just before it happens. So it is also known which faults did not happen.
Tested in tests/injection/test_faults.py and tests/faults/test_restarts.py.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from meshwise.compat.sharding import local_of
from meshwise.records import folder as names
from meshwise.records.files import append_lines
from meshwise.spec.faults import Fault
from meshwise.timeline.recorder import Mark, Recorder
from meshwise.workers.environment import ATTEMPT


class InjectedFault(RuntimeError):
    """Raised by `--fault raise`."""


class ArmedFaults:
    """The faults that are still to be injected in this rank's process. Each fault that happens is recorded in the run
    folder."""

    def __init__(self, faults: Sequence[Fault], folder: Path | None) -> None:
        self._left, self._folder = list(faults), folder
        self._slowed: set[tuple[Fault, int]] = set()
        self.parameters: Callable[[], Iterable[Tensor]] = tuple
        """A function that returns the parameters that this rank holds."""

    def phase_begins(self, phase: str, step: int) -> None:
        """Inject the faults that are due at the beginning of this phase of this step."""
        for fault in [f for f in self._left if f.phase == phase]:
            if fault.kind == "slow" and step >= fault.step:
                self._slow(fault, step)
            elif step == fault.step:
                self._left.remove(fault)
                self._tell(fault)
                self._happen(fault)

    def _slow(self, fault: Fault, step: int) -> None:
        if (fault, step) not in self._slowed:
            if not self._slowed:
                self._tell(fault)
            self._slowed.add((fault, step))
            time.sleep(fault.seconds)

    def _tell(self, fault: Fault) -> None:
        fact = {"fault": str(fault), "attempt": int(os.environ.get(ATTEMPT, "1")), "time": time.time()}
        if self._folder is not None:
            with contextlib.suppress(OSError):  # the folder is gone, or its disk full
                append_lines(self._folder / names.FAULTS, [fact])

    def _happen(self, fault: Fault) -> None:
        kind = fault.kind
        if kind in ("kill", "lost", "stop"):
            os.kill(os.getpid(), signal.SIGSTOP if kind == "stop" else signal.SIGKILL)
        elif kind == "exit":
            os._exit(1)
        elif kind == "raise":
            raise InjectedFault(f"raised by --fault {fault}")
        elif kind == "oom":
            raise torch.OutOfMemoryError(f"out of memory, simulated by --fault {fault}")
        elif kind == "hang":
            while True:
                time.sleep(1.0)
        else:
            self._spoil(kind)

    def _spoil(self, kind: str) -> None:
        held = (local_of(p.detach()) for p in self.parameters())
        part = next(t for t in held if t.numel() and t.is_floating_point())
        first = part.as_strided((1,), (1,))
        if kind == "nan":
            first.fill_(float("nan"))
        else:  # of the mantissa: the value changes, and stays finite
            first.view(torch.uint8)[part.element_size() - 2] ^= 0x08

    def watch(self, recorder: Recorder) -> None:
        """Make `recorder` inject these faults. Its class becomes FaultyRecorder."""
        phase = recorder.__dict__.pop("phase")
        recorder.__class__ = FaultyRecorder
        assert isinstance(recorder, FaultyRecorder)
        recorder.faults, recorder._phase = self, phase


class FaultyRecorder(Recorder):
    """A recorder that also injects the faults of `--fault`. A fault happens when this rank enters the step and the
    phase that the fault names, such as `backward`."""

    faults: ArmedFaults

    @property
    def phase(self) -> str:
        """The current phase of the step on this rank, such as `data`, `forward` or `optimizer`."""
        return self._phase

    @phase.setter
    def phase(self, phase: str) -> None:
        self._phase = phase
        self.faults.phase_begins(phase, self.step + (phase == "data"))

    def arrive(self) -> int:
        """Inject the faults that are due when a collective begins. Then return the number of the collective, as in
        `Recorder`."""
        self.faults.phase_begins("communication", self.step)
        return super().arrive()

    def begin_collective(self, name: str) -> tuple[int, int, Mark]:
        """Inject the faults that are due when a collective begins. Then begin the collective, as in `Recorder`."""
        self.faults.phase_begins("communication", self.step)
        return super().begin_collective(name)
