"""Read facts from the autograd graph of a loss."""
