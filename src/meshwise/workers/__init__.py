"""Start, watch and end the workers of a list of devices.

The side channel connects them and their launcher.
"""
