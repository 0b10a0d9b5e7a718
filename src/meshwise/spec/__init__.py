"""The nouns that every room speaks: frozen dataclasses, units and the error tree. No torch here."""
