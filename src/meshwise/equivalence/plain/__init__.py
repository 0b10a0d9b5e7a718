"""Check a script of DDP or accelerate as it is.

Its ranks run first, and what they read and compute is recorded (`watch`). Then it runs as one process, which reads in
each step what all ranks read (`watch` again, which follows a `record`). `judge` says what differs, and what the counts
show. Both run in float64, with dropout off.
"""
