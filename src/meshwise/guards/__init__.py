"""Find mistakes in a step or a loop before they cost numbers, one per file."""
