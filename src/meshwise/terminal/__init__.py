"""Format text for a terminal: tables, wrapped sentences, marks.

Built on rich.
"""
