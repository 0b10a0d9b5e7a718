"""Find races between CUDA streams, with vector clocks."""
