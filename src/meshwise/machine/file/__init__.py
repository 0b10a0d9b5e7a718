"""Read and write the machine file: a machine as editable TOML."""
