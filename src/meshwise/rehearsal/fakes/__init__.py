"""What a rehearsal runs on that is not there, made with private torch: CUDA by its name, other ranks."""
