"""Read the place of a process from its launcher's variables: a file each."""
