"""Hold this process's engine: its plan, its end, its errors."""

from meshwise.spec.lazy import files_of

__getattr__ = files_of(__name__)
