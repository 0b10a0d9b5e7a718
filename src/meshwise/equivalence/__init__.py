"""Check that a plan computes what one device does, in float64.

If the two differ, find where and why.
"""
