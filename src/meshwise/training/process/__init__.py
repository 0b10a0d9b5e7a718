"""Keep a process's engine, choose its plan and explain its errors."""

from meshwise.spec.lazy import files_of

__getattr__ = files_of(__name__)
