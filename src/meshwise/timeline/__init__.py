"""When things happened: spans of each rank, where the time went, and how a run is drawn, live and afterwards."""
