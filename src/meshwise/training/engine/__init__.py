"""Apply a plan to a program's models, and run exact steps.

The training loop belongs to a script or to a job.
"""

from meshwise.spec.lazy import files_of

__getattr__ = files_of(__name__)
