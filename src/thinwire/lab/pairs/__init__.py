"""Methods in which two replicas average at a time."""
