"""The engine: a plan applied to a program's models; one exact step, in a script's loop and in a job's."""

from meshwise.spec.lazy import files_of

__getattr__ = files_of(__name__)
