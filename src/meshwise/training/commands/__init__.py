"""Define the commands for checkpoints and weights, one per file."""
