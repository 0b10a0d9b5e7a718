"""Move bytes between devices and processes; no other room does.

Only this room copies across devices or calls a collective.
"""
