"""Show a proof as text and as plain values."""

from meshwise.spec.lazy import files_of

__getattr__ = files_of(__name__)
