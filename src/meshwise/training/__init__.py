"""The job, the step, the loop, the loader and the evaluation."""

from meshwise.spec.lazy import files_of

__getattr__ = files_of(__name__)
