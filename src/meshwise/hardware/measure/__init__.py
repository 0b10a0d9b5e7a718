"""Measure copies, collectives and matrix products, and check every byte."""
