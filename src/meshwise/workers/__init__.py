"""Start, watch and end the workers of a list of devices.

With the side channel between them and their launcher.
"""
