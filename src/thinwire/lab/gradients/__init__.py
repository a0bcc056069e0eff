"""Gradient methods beside the core's."""

from thinwire.lazy import lazily

__getattr__ = lazily(__name__, {})
