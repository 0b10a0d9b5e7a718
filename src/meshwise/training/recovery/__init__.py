"""Save, load and resume the state of a run."""
