"""What is here: from drivers, the system's own files and torch to a Machine."""
