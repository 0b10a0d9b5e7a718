"""Define the commands of this house, one per file."""
