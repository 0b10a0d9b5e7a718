"""When things happened: spans of each rank, where the time went, how a run is drawn while it goes on and at its end."""
