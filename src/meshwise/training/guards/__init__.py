"""Detect a program's mistakes early: each file detects one kind."""
