"""What a rank records of its run: a script's, a job's, and that of a program without our verbs."""

from meshwise.spec.lazy import files_of

__getattr__ = files_of(__name__)
