"""Built-in jobs: the examples that are also the test models."""
