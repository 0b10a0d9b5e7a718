"""Provide built-in jobs: the examples that are also test models."""
