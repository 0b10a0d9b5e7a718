"""Implement the public functions and the commands of meshwise."""

from meshwise.spec.lazy import files_of

__getattr__ = files_of(__name__)
