"""Find, describe, measure and judge devices and links.

And say which worker gets which device and cores.
"""
