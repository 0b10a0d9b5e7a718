"""The state of a run: checkpoints and resume."""
