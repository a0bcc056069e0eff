"""Elastic rounds: the plan that members derive from each other's status, and the loop that runs it."""
