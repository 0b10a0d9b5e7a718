"""Predict a run: trace on fake tensors, price, simulate, search.

The real step is traced, and priced on a machine.
"""
