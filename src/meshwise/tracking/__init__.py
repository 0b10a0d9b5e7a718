"""Where a run's numbers go: metrics.jsonl, the launcher, trackers."""

from meshwise.spec.lazy import files_of

__getattr__ = files_of(__name__)
