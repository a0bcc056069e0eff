"""The composition of a method for replicas of unequal speed."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from thinwire.codecs import E3M0, Codec
from thinwire.drivers.attached import Traits
from thinwire.drivers.unequal.timeline import Timeline
from thinwire.errors import ConfigurationError
from thinwire.pieces.feedback import Feedback
from thinwire.pieces.outer import Nesterov, Outer
from thinwire.pieces.partition import Partition, Whole
from thinwire.pieces.piece import check_piece
from thinwire.pieces.staleness import ByTokens, Correct, HeLoCo, Weigh


@dataclass(frozen=True, kw_only=True)
class Composition:
    """The pieces and the timing of rounds, as a frozen value.

    Args:
        every: mean of H over all replicas; each replica's own H follows its speed, so that all send equally often.
        partition: how the model is cut into fragments.
        codec, down: encode the deltas for the syncer; encode the round's estimate for the replicas.
        feedback: adds the codecs' errors to the next message, on both sides. None: errors are dropped.
        outer: the outer step, which every replica takes on the syncer's estimate.
        weigh, correct: the weight of a delta; the correction of a stale one (None: none).
        quorum: least number of replicas whose deltas a round needs.
        grace: time that a round waits for replicas that are expected, as a share of the time between two deltas.
        patience: least seconds for a replica's last delta after another replica has taken all steps; a later one is left out.
        slow: run in virtual time, in which an inner step of replica m takes slow[m]; (): in real time, by measured speed.
        delay: in virtual time, number of mean inner steps from departure to landing.
        seed: seed of the codecs' random numbers.

    Raises:
        ConfigurationError: a setting cannot work; the message says what is needed.

    >>> Composition(slow=(1, 2, 4)).timeline(fragments=1).every
    [51, 26, 13]
    """

    every: int = 30
    partition: Partition = Whole()
    codec: Codec = E3M0()
    down: Codec = E3M0()
    feedback: Feedback | None = Feedback()
    outer: Outer = Nesterov(0.7, 0.5)
    weigh: Weigh = ByTokens()
    correct: Correct | None = HeLoCo()
    quorum: int = 1
    grace: float = 0.5
    patience: float = 60.0
    slow: tuple[float, ...] = ()
    delay: int = 0
    seed: int = 0

    @property
    def traits(self) -> Traits:
        return Traits(own_steps=True, weighs_samples=True)

    def __post_init__(self) -> None:
        kinds: dict[str, Any] = {"partition": Partition, "codec": Codec, "down": Codec, "outer": Outer, "weigh": Weigh}
        kinds |= {"correct": Correct | None, "feedback": Feedback | None}
        for name, kind in kinds.items():
            check_piece(name, getattr(self, name), kind)
        counts = {"every": self.every, "quorum": self.quorum}
        if any(type(number) is not int or number < 1 for number in counts.values()):
            raise ConfigurationError(f"every={self.every}, quorum={self.quorum}: whole numbers above 0 are needed.")
        if type(self.delay) is not int or not 0 <= self.delay < self.every or (self.delay and not self.slow):
            raise ConfigurationError(
                f"delay={self.delay} with every={self.every}, slow={self.slow}: 0 <= delay < every is needed, and 0 in real time, where a "
                "round lands when it arrives."
            )
        if not 0 <= self.grace < math.inf or not 0 <= self.patience < math.inf:
            raise ConfigurationError(
                f"grace={self.grace}, patience={self.patience}: grace >= 0 and patience >= 0 are needed."
            )
        if not all(0 < one < math.inf for one in self.slow):
            raise ConfigurationError(f"slow={self.slow}: factors above 0 are needed.")
        if self.feedback and self.feedback != Feedback():
            raise ConfigurationError(
                f"feedback={self.feedback}: replicas come to the syncer at different times and keep no common reference; choose Feedback() or None."
            )
        for codec in (self.codec, self.down):
            if self.feedback:
                self.feedback.check(codec)
            if codec.joint or codec.varies:
                raise ConfigurationError(
                    f"{codec}: a codec whose packets have a fixed size, and can be decoded alone, is needed; choose E3M0()."
                )

    def timeline(self, fragments: int, own: int = -1) -> Timeline:
        """The timeline of a run in virtual time, for replica `own` or for the syncer."""
        return Timeline(self.slow, self.every, fragments, self.quorum, self.grace, self.delay, own)
