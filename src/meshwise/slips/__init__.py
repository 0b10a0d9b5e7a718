"""Mistakes of a script that its source shows: sums, averages and counters of this rank's part alone."""
