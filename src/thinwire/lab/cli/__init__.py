"""Verbs of the lab."""

from thinwire.lazy import lazily

__getattr__ = lazily(__name__, {})
