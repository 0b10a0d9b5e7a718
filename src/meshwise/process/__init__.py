"""The engine of this process: its plan, its end, and the context of an error."""

from meshwise.spec.lazy import files_of

__getattr__ = files_of(__name__)
