"""The machine file: a machine as TOML that people read and edit."""
