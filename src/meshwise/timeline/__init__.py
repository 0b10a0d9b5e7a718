"""Record spans of each rank, analyse where time went, and draw a run."""

from meshwise.spec.lazy import files_of

__getattr__ = files_of(__name__)
