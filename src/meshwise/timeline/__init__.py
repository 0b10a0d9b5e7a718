"""When things happened: spans of each rank, where the time went, and how a run is drawn, live and afterwards."""

from meshwise.spec.lazy import files_of

__getattr__ = files_of(__name__)
