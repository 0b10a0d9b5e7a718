"""Find devices and processor cores, and say which worker gets which."""
