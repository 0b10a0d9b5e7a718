"""Predict every sample once, in the data's order."""
