"""Apply a plan to a program's models, and run exact steps.

The loop is a script's or a job's.
"""

from meshwise.spec.lazy import files_of

__getattr__ = files_of(__name__)
