"""Rounds among replicas that come and go: what they conclude from each other's status, and the loop that does it."""
