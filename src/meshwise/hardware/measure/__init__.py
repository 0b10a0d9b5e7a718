"""Measure copies, collectives and products, and verify the bytes delivered."""
