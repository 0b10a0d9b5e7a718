"""The public verbs, short: what each does lives in its room."""
