"""Find, describe, measure and judge devices and links, and say which worker gets which device and cores."""
