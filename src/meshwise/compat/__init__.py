"""Private and moving torch APIs, each probed, with a fallback or a clear refusal."""
