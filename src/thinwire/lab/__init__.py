"""Methods and studies that few run, all working. It comes in by entry points; nothing outside imports it."""

from thinwire.lazy import lazily

__getattr__ = lazily(__name__, {})
