"""Define the values that all packages share: frozen dataclasses, units, errors.

This package does not import torch.
"""
