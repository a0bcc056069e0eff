"""An exchange that a hub averages."""

from thinwire.lazy import lazily

__getattr__ = lazily(__name__, {})
