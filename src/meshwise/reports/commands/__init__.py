"""Define the commands of this house, one verb per file."""
