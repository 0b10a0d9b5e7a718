"""Define the checker's commands, one per file."""
