"""Start, watch and restart a run, on one machine or several."""

from meshwise.spec.lazy import files_of

__getattr__ = files_of(__name__)
