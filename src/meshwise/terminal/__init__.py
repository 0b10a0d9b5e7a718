"""Text for a terminal: tables, sentences that fit, and the marks of kinds of time. Built on rich."""
