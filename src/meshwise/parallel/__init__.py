"""Apply the techniques of a plan to an ordinary nn.Module."""

from meshwise.spec.lazy import files_of

__getattr__ = files_of(__name__)
