"""Check: one device against the plan, in float64. Where they part, and why."""
