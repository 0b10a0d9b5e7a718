"""Arrays on many devices of one process, or on the ranks of a run: the Python array API over parts that are tensors."""
