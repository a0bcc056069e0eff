"""Codecs turn tensors into bytes and back. They are pure: no state, no network."""

from typing import TYPE_CHECKING

from thinwire.lazy import lazily

if TYPE_CHECKING:
    from thinwire.codecs.base import Codec as Codec
    from thinwire.codecs.base import Shapes as Shapes
    from thinwire.codecs.base import check_finite as check_finite
    from thinwire.codecs.base import encode_from as encode_from
    from thinwire.codecs.base import nested as nested
    from thinwire.codecs.base import packet_nbytes as packet_nbytes
    from thinwire.codecs.base import rebuilt as rebuilt
    from thinwire.codecs.base import unwritten as unwritten
    from thinwire.codecs.base import warm_up as warm_up
    from thinwire.codecs.block import E2M1 as E2M1
    from thinwire.codecs.block import E3M0 as E3M0
    from thinwire.codecs.block import E4M3 as E4M3
    from thinwire.codecs.block import E5M2 as E5M2
    from thinwire.codecs.block import Int as Int
    from thinwire.codecs.cast import Cast as Cast
    from thinwire.codecs.cast import Identity as Identity
    from thinwire.codecs.cast import in_full as in_full
    from thinwire.codecs.codebook import Codebook as Codebook
    from thinwire.codecs.sign import Sign as Sign
    from thinwire.codecs.sparse import ChunkedTopK as ChunkedTopK
    from thinwire.codecs.sparse import RandomK as RandomK
    from thinwire.codecs.sparse import TopK as TopK
    from thinwire.codecs.transform import DCT as DCT
    from thinwire.codecs.transform import Hadamard as Hadamard
    from thinwire.codecs.transform import Squares as Squares

_HOMES = {
    **dict.fromkeys(("Codec", "Shapes", "check_finite", "nested", "packet_nbytes", "rebuilt", "unwritten"), "base"),
    **dict.fromkeys(("E2M1", "E3M0", "E4M3", "E5M2", "Int"), "block"),
    **dict.fromkeys(("Cast", "Identity", "in_full"), "cast"),
    "Codebook": "codebook",
    "encode_from": "base",
    "Sign": "sign",
    **dict.fromkeys(("ChunkedTopK", "RandomK", "TopK"), "sparse"),
    **dict.fromkeys(("DCT", "Hadamard", "Squares"), "transform"),
    "warm_up": "base",
}
__all__ = sorted(_HOMES)
__getattr__ = lazily(__name__, _HOMES)
