"""Predict a run's time and memory, and search for the best plan.

The program's real step is traced on fake tensors, priced for a machine, and simulated.
"""

from meshwise.spec.lazy import files_of

__getattr__ = files_of(__name__)
