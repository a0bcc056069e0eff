"""Training over links in virtual time: no tensors, no network, no clock. All figures of this package are *simulated*, those of
`formulas` *predicted*.
"""

from thinwire.lazy import lazily

__getattr__ = lazily(__name__, {})
