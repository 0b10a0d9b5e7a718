"""Read the place of a process from the variables of its launcher: one file for each."""
