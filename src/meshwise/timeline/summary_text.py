# stub: to be replaced
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class RunSummary:
    job: str; plan: str; devices: Any; status: str; epochs: int; steps: int; samples: int; seconds: float; train_seconds: float; samples_per_second: float; metrics: Any; phases: Any; memory: Any; folder: str; notes: Any
def summary_text(s, width): return str(s)
def summary_dict(s): return asdict(s)
