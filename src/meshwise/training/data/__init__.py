"""Decide which rank reads which sample, and draw keyed random numbers."""
