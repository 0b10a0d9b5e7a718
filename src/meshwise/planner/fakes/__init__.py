"""Fake what a rehearsal lacks: CUDA, and other ranks.

The fakes use private functions of torch.
"""
