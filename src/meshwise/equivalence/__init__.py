"""Check that a plan computes what one device does, in float64.

It also finds where the two differ, and why.
"""
