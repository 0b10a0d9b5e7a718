"""A script that keeps its own loop: the two lines, its loader, its sums, its checkpoint."""
