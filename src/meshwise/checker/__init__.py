"""Check that a plan computes what one device does, in float64.

If the two differ, find where and why.
"""

from meshwise.spec.lazy import files_of

__getattr__ = files_of(__name__)
