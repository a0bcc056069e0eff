"""Tensor to bytes and back: pure, without state or network."""

from thinwire.codecs.base import Codec, check_finite, packet_nbytes
from thinwire.codecs.block import E2M1, E3M0, E4M3, E5M2, Int
from thinwire.codecs.cast import Cast, Identity

__all__ = ["E2M1", "E3M0", "E4M3", "E5M2", "Cast", "Codec", "Identity", "Int", "check_finite", "packet_nbytes"]
