"""Read and write the run folder: atomic files, JSON lines.

This package does not import torch.
"""
