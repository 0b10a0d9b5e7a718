"""Distribute a script with its own loop: two lines, loader, sums, checkpoint."""
