"""Format text for a terminal: tables, wrapped sentences, marks.

Everything is built on rich.
"""
