"""Start and end the workers of a list of devices; the side channel between them and their launcher."""
