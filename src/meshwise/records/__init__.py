"""Read and write the run folder: atomic files, JSON lines.

No torch here.
"""
