"""Detect who started this process, one launcher per file, as a `Place`."""
