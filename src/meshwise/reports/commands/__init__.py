"""Define the commands that show recorded runs, one per file."""
