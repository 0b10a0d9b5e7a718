"""Find numbers that become wrong on several ranks or after resumes.

Examples are batch sizes divided by the number of ranks, and epochs that a resumed loop counts from 0.
"""
