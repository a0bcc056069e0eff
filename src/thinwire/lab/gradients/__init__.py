"""Gradient methods beside the core's."""
