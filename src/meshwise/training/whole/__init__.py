"""Show a training loop whole batches, whose rows lie on the ranks."""
