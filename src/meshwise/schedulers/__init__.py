"""Batch schedulers: what a site wants of a job, the script that is sent, and the scheduler's own commands. No torch."""
