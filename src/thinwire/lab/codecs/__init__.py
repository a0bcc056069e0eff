"""Codecs that few compositions use."""

from typing import TYPE_CHECKING

from thinwire.lazy import lazily

if TYPE_CHECKING:
    from thinwire.lab.codecs.entropy import Entropy as Entropy
    from thinwire.lab.codecs.levelled import Levelled as Levelled
    from thinwire.lab.codecs.lowrank import LowRank as LowRank
    from thinwire.lab.codecs.over_senders import OverSenders as OverSenders
    from thinwire.lab.codecs.per_tensor import Each as Each
    from thinwire.lab.codecs.uniform import Levels as Levels

_HOMES = {
    "Entropy": "entropy",
    "Levelled": "levelled",
    "LowRank": "lowrank",
    "OverSenders": "over_senders",
    "Each": "per_tensor",
    "Levels": "uniform",
}
__all__ = sorted(_HOMES)
__getattr__ = lazily(__name__, _HOMES)
