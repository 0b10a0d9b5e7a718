"""The engine of this process: its plan, its end, and what an error is told with."""

from meshwise.spec.lazy import files_of

__getattr__ = files_of(__name__)
