"""Apply a plan to an ordinary nn.Module: one technique a file."""
