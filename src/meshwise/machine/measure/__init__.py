"""Measure what is there: copies, collectives, products; and whether every path delivers the bytes it was given."""
