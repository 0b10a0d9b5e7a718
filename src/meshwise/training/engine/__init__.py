"""Apply a plan to a program's models, and run exact steps.

The training loop is that of a script or of a job.
"""

from meshwise.spec.lazy import files_of

__getattr__ = files_of(__name__)
