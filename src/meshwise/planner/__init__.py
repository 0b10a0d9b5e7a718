"""Predict a run: trace on fake tensors, price, simulate, search.

The real step is traced, and priced on a machine.
"""

from meshwise.spec.lazy import files_of

__getattr__ = files_of(__name__)
