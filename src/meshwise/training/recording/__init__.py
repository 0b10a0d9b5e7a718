"""Record one rank of a job, a script or any PyTorch program."""

from meshwise.spec.lazy import files_of

__getattr__ = files_of(__name__)
