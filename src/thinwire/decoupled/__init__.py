"""Replicas of unequal speed that do not wait for all: a syncer holds rounds of what has come, or neighbours meet two at a time."""
