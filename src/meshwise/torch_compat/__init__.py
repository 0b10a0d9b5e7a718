"""Wrap private and changing torch APIs, and probe whether each exists.

If an API is missing, there is a fallback or a clear refusal.
"""
