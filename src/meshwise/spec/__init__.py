"""Define the values that all houses share: frozen dataclasses, units, errors.

This package does not import torch.
"""
