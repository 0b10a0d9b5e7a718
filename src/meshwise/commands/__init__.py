"""The commands, one verb a file: options, and what is printed."""
