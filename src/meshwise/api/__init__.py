"""Implement the public functions and commands, in a user's order."""

from meshwise.spec.lazy import files_of

__getattr__ = files_of(__name__)
