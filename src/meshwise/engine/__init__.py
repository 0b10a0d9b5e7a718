"""Apply a plan to a program's models, and run exact steps.

In a script's loop and in a job's.
"""

from meshwise.spec.lazy import files_of

__getattr__ = files_of(__name__)
