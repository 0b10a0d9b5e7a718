"""Send a run's numbers to metrics.jsonl, the launcher and trackers."""

from meshwise.spec.lazy import files_of

__getattr__ = files_of(__name__)
