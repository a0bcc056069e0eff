"""Tensor to bytes and back: pure, without state or network."""

from thinwire.codecs.base import (
    Codec,
    Linear,
    Shaped,
    Shapes,
    check_finite,
    fitted,
    nested,
    packet_nbytes,
    rebuilt,
    warm_up,
)
from thinwire.codecs.block import E2M1, E3M0, E4M3, E5M2, Int
from thinwire.codecs.cast import Cast, Identity, in_full
from thinwire.codecs.codebook import Codebook
from thinwire.codecs.device import encode_from
from thinwire.codecs.each import Each
from thinwire.codecs.lowrank import LowRank
from thinwire.codecs.sign import Sign
from thinwire.codecs.sparse import ChunkedTopK, RandomK, TopK
from thinwire.codecs.transform import DCT, Hadamard, Squares

__all__ = [
    "DCT",
    "E2M1",
    "E3M0",
    "E4M3",
    "E5M2",
    "Cast",
    "ChunkedTopK",
    "Codebook",
    "Codec",
    "Each",
    "Hadamard",
    "Identity",
    "Int",
    "Linear",
    "LowRank",
    "RandomK",
    "Shaped",
    "Shapes",
    "Sign",
    "Squares",
    "TopK",
    "check_finite",
    "encode_from",
    "fitted",
    "in_full",
    "nested",
    "packet_nbytes",
    "rebuilt",
    "warm_up",
]
