def scores(rows, kept, places): pass
