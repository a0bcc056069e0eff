"""Studies of the planner."""

from thinwire.lazy import lazily

__getattr__ = lazily(__name__, {})
