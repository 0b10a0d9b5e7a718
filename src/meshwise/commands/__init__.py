"""Define the commands, one verb per file: options and output."""
