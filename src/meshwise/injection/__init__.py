"""Inject the faults of `--fault`."""

from meshwise.spec.lazy import files_of

__getattr__ = files_of(__name__)
