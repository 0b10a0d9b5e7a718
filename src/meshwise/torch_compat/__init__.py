"""Wrap private and moving torch APIs, each with a probe.

Where a probe fails, there is a fallback or a clear refusal.
"""
