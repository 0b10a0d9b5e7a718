"""Draw the numbers of a report in several forms.

No view computes a number itself.
"""

from meshwise.spec.lazy import files_of

__getattr__ = files_of(__name__)
