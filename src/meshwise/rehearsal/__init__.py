"""A run known before it happens: the real step on fake tensors, priced on a machine, simulated; the plans searched."""
