"""Read the place of a process: one file for each launcher."""
