"""The pieces a strategy is composed of: frozen values that are their own configuration."""

from thinwire.lazy import lazily

__getattr__ = lazily(__name__, {})
