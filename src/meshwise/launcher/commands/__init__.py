"""Define the launcher's commands, one per file."""
