"""Find counters in a script that ranks or a resume would change.

Examples are batch sizes divided by the number of ranks, and epochs that a resumed loop counts from 0.
"""
