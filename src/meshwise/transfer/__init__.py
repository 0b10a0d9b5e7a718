"""Move bytes between devices and processes; no other package does.

Other packages of meshwise neither copy across devices nor call a collective.
"""
