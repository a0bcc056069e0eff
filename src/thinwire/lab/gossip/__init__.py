"""Methods without agreement: each replica mixes with its neighbors."""
