"""Parse faults to inject into a run: `--fault kill:rank=2,step=40`."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from meshwise.spec.errors import UsageError, check_known

KINDS = {
    "kill": "the rank's process is killed (SIGKILL)",
    "lost": "the process is killed, and its device is gone for the rest of the run, or for back=2 attempts",
    "raise": "an exception is raised",
    "exit": "the process ends with exit code 1, without a message",
    "hang": "the rank sleeps forever",
    "stop": "the process is stopped (SIGSTOP)",
    "slow": "the phase takes the given time longer, in this step and all later steps: slow 20ms:rank=1,step=5",
    "oom": "the device is out of memory",
    "nan": "a parameter of the rank becomes NaN",
    "bitflip": "a bit of a parameter of the rank is flipped",
}
"""What each kind of fault does to the rank that `--fault` names. `back=` is a field of `Fault`."""
PHASES = ("data", "forward", "backward", "communication", "optimizer", "evaluate", "checkpoint")
"""The phases of a step. A fault happens as its phase begins: `communication` begins with a collective of all ranks."""
_SECONDS = {"us": 1e-6, "ms": 1e-3, "s": 1.0}
EXAMPLE = "Write --fault kill:rank=1,step=40, and add ,phase=backward or ,attempt=2 if you need them."


@dataclass(frozen=True)
class Fault:
    """A fault that is injected once into a run.

    step: the step in which the fault happens. Steps are counted from 1, and go on counting after a restart.
    attempt: the attempt in which the fault happens. 1 is the first start of the run, and 2 is the first restart.
    seconds: the delay of a `slow` fault.
    back: after how many attempts a lost device returns. 0 means never.
    """

    kind: str
    rank: int
    step: int
    phase: str = "forward"
    attempt: int = 1
    seconds: float = 0.0
    back: int = 0

    def __str__(self) -> str:
        slow = f" {self.seconds * 1e3:g}ms" if self.kind == "slow" else ""
        attempt = f",attempt={self.attempt}" if self.attempt != 1 else ""
        back = f",back={self.back}" if self.back else ""
        return f"{self.kind}{slow}:rank={self.rank},step={self.step},phase={self.phase}{attempt}{back}"


def parse_fault(text: str) -> Fault:
    """Parse a fault such as `kill:rank=2,step=40`. Raises UsageError for a text that is not a fault."""
    head, _, rest = text.partition(":")
    kind, _, duration = head.strip().partition(" ")
    check_known("--fault", kind, KINDS)
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(us|ms|s)", duration.strip())
    if (kind == "slow") != (found is not None) or (duration and kind != "slow"):
        need = "needs a duration" if kind == "slow" else "takes no duration"
        raise UsageError(f"--fault {text!r}: {kind} {need}. Write --fault 'slow 20ms:rank=1,step=5', or kill:rank=1,…")
    given = [part.partition("=") for part in rest.split(",") if part.strip()]
    values = {name.strip(): value.strip() for name, _, value in given}
    for name in values:
        check_known(f"--fault {text!r}: field", name, ("rank", "step", "phase", "attempt", "back"))
    if missing := [name for name in ("rank", "step") if name not in values]:
        raise UsageError(f"--fault {text!r}: {' and '.join(missing)} is missing. {EXAMPLE}")
    if len(values) < len(given):
        raise UsageError(f"--fault {text!r}: a field is given twice. {EXAMPLE}")
    if "back" in values and kind != "lost":
        raise UsageError(f"--fault {text!r}: only the fault lost has a field back=. Remove it, or write lost:rank=1,…")
    phase = values.pop("phase", "forward")
    check_known(f"--fault {text!r}: phase", phase, PHASES)
    numbers = {name: _number(text, name, value) for name, value in values.items()}
    seconds = float(found[1]) * _SECONDS[found[2]] if found else 0.0
    return Fault(kind, phase=phase, seconds=seconds, **numbers)


def faults_of(texts: Sequence[str], ranks: int) -> tuple[Fault, ...]:
    """Parse the values of the option `--fault`. Raises UsageError for a value that cannot be parsed, and for a rank
    that is not below `ranks`, the number of ranks of the run.
    """
    faults = tuple(map(parse_fault, texts))
    for fault in faults:
        if fault.rank >= ranks:
            raise UsageError(f"--fault {fault}: the run has {ranks} ranks. Name one of 0 to {ranks - 1}.")
    return faults


def _number(text: str, name: str, value: str) -> int:
    least = 0 if name == "rank" else 1
    if not re.fullmatch(r"\d{1,9}", value) or int(value) < least:
        raise UsageError(f"--fault {text!r}: {name}={value!r} is not a whole number of at least {least}. {EXAMPLE}")
    return int(value)
