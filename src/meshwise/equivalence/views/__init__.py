"""What a check found, for a terminal and as JSON."""
