"""Find, describe, measure and judge devices and links.

This package also decides which worker gets which device and cores.
"""

from meshwise.spec.lazy import files_of

__getattr__ = files_of(__name__)
