"""Aggregates that bear liars, and the attacks to try them with."""
