"""Define the planner's commands, one per file."""
