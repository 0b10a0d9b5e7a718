"""A machine and its bench as people see them."""
