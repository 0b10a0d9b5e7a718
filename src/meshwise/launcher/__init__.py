"""The launcher of a run: started, watched, started again, on one machine and on several."""

from meshwise.spec.lazy import files_of

__getattr__ = files_of(__name__)
