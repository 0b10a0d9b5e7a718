"""Distribute a script with its own loop: loaders, sums and checkpoints."""
