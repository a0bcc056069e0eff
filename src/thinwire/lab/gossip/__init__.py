"""Methods without agreement: each replica mixes with its neighbors."""

from thinwire.lazy import lazily

__getattr__ = lazily(__name__, {})
