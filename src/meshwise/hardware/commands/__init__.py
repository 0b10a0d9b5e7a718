"""Define the commands for devices and machines, one per file."""
