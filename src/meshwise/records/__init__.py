"""The run folder: file names, atomic writes, JSON lines, reading back. No torch here."""
