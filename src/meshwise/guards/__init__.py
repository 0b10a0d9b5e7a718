"""What is wrong with a step or a loop, told before it costs numbers: one file a guard."""
