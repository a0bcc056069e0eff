"""Methods in which two replicas average at a time."""

from thinwire.lazy import lazily

__getattr__ = lazily(__name__, {})
