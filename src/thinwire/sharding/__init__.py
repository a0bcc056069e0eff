"""Inside a site: one model spread over ranks that share fast links, in three degrees, with few bits between machines."""

from thinwire.sharding.degrees import FP32, MIXED, Precision, Shards
from thinwire.sharding.layout import Layout, Sharding, by_level, zero_plus_plus
from thinwire.sharding.sharded import Sharded

__all__ = ["FP32", "MIXED", "Layout", "Precision", "Sharded", "Sharding", "Shards", "by_level", "zero_plus_plus"]
