"""Implement the Python array API on many devices, or on ranks.

The parts of an array are tensors on the devices of one process, or on the ranks of a run.
"""
