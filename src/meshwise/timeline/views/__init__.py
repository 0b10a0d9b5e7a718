"""Views of a report: each draws the same numbers in another form. None makes a number of its own."""
