"""Check an unchanged script that uses DDP or accelerate.

The script's ranks run first, and what they read and compute is recorded (`watch`, `record`). Then the script runs as
one process, which reads in each step what all ranks read together (`watch` again, with a `Follow`). `judge` compares
the two runs, and checks sample and scheduler counts. Both runs are in float64, with dropout off.
"""
