"""Apply a plan to an ordinary nn.Module: one technique a file."""

from meshwise.spec.lazy import files_of

__getattr__ = files_of(__name__)
