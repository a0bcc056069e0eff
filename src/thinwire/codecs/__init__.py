"""Tensor to bytes and back: pure, without state or network."""

from thinwire.codecs.base import Codec, check_finite, packet_nbytes
from thinwire.codecs.block import E3M0
from thinwire.codecs.cast import Cast, Identity

__all__ = ["E3M0", "Cast", "Codec", "Identity", "check_finite", "packet_nbytes"]
