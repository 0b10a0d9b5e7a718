"""What the autograd graph of a loss tells of it."""
