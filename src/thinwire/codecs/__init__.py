"""Codecs turn tensors into bytes and back. They are pure: no state, no network."""

from thinwire.codecs.base import Codec, Shapes, check_finite, nested, packet_nbytes, rebuilt, unwritten
from thinwire.codecs.block import E2M1, E3M0, E4M3, E5M2, Int
from thinwire.codecs.cast import Cast, Identity, in_full
from thinwire.codecs.codebook import Codebook
from thinwire.codecs.device import encode_from
from thinwire.codecs.sign import Sign
from thinwire.codecs.sparse import ChunkedTopK, RandomK, TopK
from thinwire.codecs.transform import DCT, Hadamard, Squares
from thinwire.codecs.warm import warm_up
from thinwire.lab.codecs.entropy import Entropy
from thinwire.lab.codecs.levelled import Levelled, check_kept
from thinwire.lab.codecs.lowrank import LowRank
from thinwire.lab.codecs.over_senders import OverSenders, mean_over_senders
from thinwire.lab.codecs.per_tensor import Each
from thinwire.lab.codecs.uniform import Levels

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
    "Entropy",
    "Hadamard",
    "Identity",
    "Int",
    "Levelled",
    "Levels",
    "LowRank",
    "OverSenders",
    "RandomK",
    "Shapes",
    "Sign",
    "Squares",
    "TopK",
    "check_finite",
    "check_kept",
    "encode_from",
    "in_full",
    "mean_over_senders",
    "nested",
    "packet_nbytes",
    "rebuilt",
    "unwritten",
    "warm_up",
]
