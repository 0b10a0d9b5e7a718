"""Detect a program's mistakes before they cost numbers, one per file."""
