"""Define the nouns every room shares: frozen dataclasses, units, errors.

No torch here.
"""
