"""What the public functions and the commands do, in the order of its steps."""

from meshwise.spec.lazy import files_of

__getattr__ = files_of(__name__)
