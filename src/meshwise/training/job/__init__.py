"""Define a job: its step, its loop, its options."""
