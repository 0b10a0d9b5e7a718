"""Find, describe, measure and judge devices and links.

It also decides which worker gets which device and cores.
"""
