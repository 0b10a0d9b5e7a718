# stub: to be replaced
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Progress:
    job: str; phase: str; epoch: int; epochs: int; step: int; steps: Any; loss: Any; samples_per_second: Any; seconds_left: Any; memory: Any; devices: Any
class LiveView:
    def __init__(self, console): self.c = console
    def __enter__(self): return self
    def __exit__(self, *a): pass
    def update(self, p): print(p)
    def say(self, t): print(t)
    def close(self): pass
