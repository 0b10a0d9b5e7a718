"""Find mistakes that a script's source shows.

Such mistakes are sums, averages and counters that cover this rank's part of the data only.
"""
