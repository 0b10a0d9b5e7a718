"""A job: what it is, its step, its loop, its options."""
