"""Start, watch and end the workers of a list of devices.

The side channel connects the workers with their launcher.
"""
