"""Plexus: each round is a sample of the peers."""
