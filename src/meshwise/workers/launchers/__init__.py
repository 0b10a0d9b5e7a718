"""Who started this process: one file a launcher, each read from the environment into one `Place`."""
