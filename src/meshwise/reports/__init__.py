"""Record spans of each rank, and analyse where time went.

Views draw a run from this analysis.
"""

from meshwise.spec.lazy import files_of

__getattr__ = files_of(__name__)
