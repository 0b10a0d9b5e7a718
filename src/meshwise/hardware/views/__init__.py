"""Show machines, measurements and changes as text and plain values."""

from meshwise.spec.lazy import files_of

__getattr__ = files_of(__name__)
