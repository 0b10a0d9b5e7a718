"""Predict a run: trace on fake tensors, price, simulate, search.

The program's real step is traced, and its operators are priced for a machine.
"""

from meshwise.spec.lazy import files_of

__getattr__ = files_of(__name__)
