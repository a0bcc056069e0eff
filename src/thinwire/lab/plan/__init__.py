"""Studies of the planner."""
