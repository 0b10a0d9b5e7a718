"""Move bytes between devices and processes: the only room that copies across devices or calls a collective."""
