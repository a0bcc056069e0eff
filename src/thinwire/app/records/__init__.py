"""The records of a run: event logs, sessions, replicas and membership, written and read back."""
