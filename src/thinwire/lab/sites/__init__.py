"""HALoS: local servers at sites, one above them."""

from thinwire.lazy import lazily

__getattr__ = lazily(__name__, {})
