"""Find counters that ranks or a resume would change, in a script's source.

Examples are batch sizes divided by the number of ranks, and epochs that a resumed loop counts from 0.
"""
