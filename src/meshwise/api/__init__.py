"""Implement the public functions and the commands, in the order of a user's steps."""

from meshwise.spec.lazy import files_of

__getattr__ = files_of(__name__)
