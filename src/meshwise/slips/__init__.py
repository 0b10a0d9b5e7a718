"""Find mistakes that a script's source shows.

Such mistakes are sums, averages and counters of this rank's part alone.
"""
