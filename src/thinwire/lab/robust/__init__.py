"""Aggregates that bear liars, and the attacks to try them with."""

from thinwire.lazy import lazily

__getattr__ = lazily(__name__, {})
