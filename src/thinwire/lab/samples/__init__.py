"""Plexus: each round is a sample of the peers."""

from thinwire.lazy import lazily

__getattr__ = lazily(__name__, {})
