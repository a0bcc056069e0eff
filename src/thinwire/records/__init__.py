"""What a run wrote down: event logs, sessions, replicas, membership; and how to read it back."""
