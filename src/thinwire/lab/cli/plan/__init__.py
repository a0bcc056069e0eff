"""The planner's verbs of the lab."""
