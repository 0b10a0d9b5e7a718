"""Views of a report: each draws the same numbers in another form. None makes a number of its own."""

from meshwise.spec.lazy import files_of

__getattr__ = files_of(__name__)
