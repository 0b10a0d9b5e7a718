"""Discover the machine from drivers, the system's files and torch."""
