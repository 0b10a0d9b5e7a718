"""Record spans of each rank, and analyze where time went.

Views show the analysis of a run.
"""

from meshwise.spec.lazy import files_of

__getattr__ = files_of(__name__)
