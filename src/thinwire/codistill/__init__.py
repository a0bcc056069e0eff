"""Replicas of unlike models that learn from each other's predictions."""
