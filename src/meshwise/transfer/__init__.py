"""Move bytes between devices and processes; no other package does.

No other package of meshwise copies across devices or calls a collective.
"""
