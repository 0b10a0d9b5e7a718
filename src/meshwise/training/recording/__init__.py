"""Record a rank of a script, job, or any PyTorch program."""

from meshwise.spec.lazy import files_of

__getattr__ = files_of(__name__)
