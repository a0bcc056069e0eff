"""Tensor to bytes and back: pure, without state or network."""

from thinwire.codecs.base import Codec, check_finite, packet_nbytes
from thinwire.codecs.block import E2M1, E3M0, E4M3, E5M2, Int
from thinwire.codecs.cast import Cast, Identity
from thinwire.codecs.sign import Sign
from thinwire.codecs.sparse import ChunkedTopK, RandomK, TopK

__all__ = [
    "E2M1",
    "E3M0",
    "E4M3",
    "E5M2",
    "Cast",
    "ChunkedTopK",
    "Codec",
    "Identity",
    "Int",
    "RandomK",
    "Sign",
    "TopK",
    "check_finite",
    "packet_nbytes",
]
