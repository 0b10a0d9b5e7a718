"""Record a rank's run: a script's, a job's, or any PyTorch program's."""

from meshwise.spec.lazy import files_of

__getattr__ = files_of(__name__)
