"""Policies that send more of the first rounds, or of the last ones."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from typing import ClassVar

from thinwire.codecs import E3M0, Codec, Identity, nested, rebuilt
from thinwire.errors import ConfigurationError
from thinwire.pieces.policy import LONG_RUN, Policy
from thinwire.types import State


@dataclass(frozen=True)
class DenseUntil(Policy):
    """`dense` in the first `rounds` rounds, then the strategy's codec: the warm-up of 1-bit Adam (arXiv 2102.02888) and PowerSGD.

        codec of round n = dense if n < rounds, otherwise the strategy's

    *Differs*: only the codec changes. 1-bit Adam also freezes its v then, which `Moments` does. PowerSGD's warm-up is in its authors' library,
    not in the paper's algorithm (arXiv 1905.13727).

    Args:
        rounds: number of rounds of a fragment that use `dense`.
        dense: the codec until then.

    Raises:
        ConfigurationError: a setting cannot work; the message says what is needed.

    >>> from thinwire.codecs import Sign
    >>> [DenseUntil(2).at(Sign(), 8, number, {}) for number in (0, 1, 2)]
    [Identity(), Identity(), Sign(scale='mean', block=None)]
    """

    rounds: int
    dense: Codec = Identity()

    def __post_init__(self) -> None:
        _check(self, self.rounds, self.dense)

    @property
    def changes(self) -> tuple[int, ...]:
        return (self.rounds,)

    def codecs(self, codec: Codec) -> tuple[Codec, ...]:
        return (self.dense, codec)

    def at(self, codec: Codec, numel: int, number: int, state: State) -> Codec:
        return self.dense if number < self.rounds else codec


@dataclass(frozen=True)
class DenseLast(Policy):
    """`dense` in the rounds that end a run, otherwise the strategy's codec, so that the final model has more of what sparse rounds left out.

        codec of a round = dense if no inner step follows, otherwise the strategy's

    *Source*: none; our own. Meant for `KeepUnsent`: what was not sent is in the parameters there, so it is a sum of recent steps. With
    feedback alone it is older, and a dense end does harm (docs/experiments.md).

    Args:
        dense: the codec of the last rounds, denser than the strategy's.

    Raises:
        ConfigurationError: a setting cannot work; the message says what is needed.

    >>> from thinwire.codecs import TopK
    >>> policy = DenseLast()
    >>> [one.at(TopK(0.01), 8, 5, {}) for one in (policy, policy.last)]
    [TopK(density=0.01, values=Cast(dtype='bf16')), E3M0(block=128, scale='exponent', rounding='nearest')]
    """

    dense: Codec = E3M0()

    needs_fixed_group: ClassVar[str] = "ends a run with a round of all fragments that all replicas take part in"

    def __post_init__(self) -> None:
        _check_dense(self, self.dense)

    @property
    def last(self) -> Policy:
        return DenseUntil(LONG_RUN + 1, self.dense)

    def codecs(self, codec: Codec) -> tuple[Codec, ...]:
        return (self.dense, codec)

    def at(self, codec: Codec, numel: int, number: int, state: State) -> Codec:
        return codec


@dataclass(frozen=True)
class DensityWarmup(Policy):
    """A sparse codec keeps more at first: each of `densities` for `rounds` rounds, then its own density, and never fewer values than that.

        density of round n = max(densities[⌊n / rounds⌋], the codec's own)          the codec's own from round rounds·len(densities)

    It changes every TopK, ChunkedTopK and RandomK in the codec.

    *Source*: Deep Gradient Compression (Lin et al., arXiv 1712.01887, §3.3), whose list this is, for its last density of 0.1 %. *Differs*: there
    a stage is an epoch; here, if a packet would not be smaller than in `dense`, `dense` is used.

    Args:
        rounds: number of rounds of a fragment for each of `densities`.
        densities: shares of the values, in (0, 1].
        dense: the codec to use if a density is so high that `dense` is not larger.

    Raises:
        ConfigurationError: a setting cannot work; the message says what is needed.

    >>> from thinwire.codecs import TopK
    >>> warmup = DensityWarmup(rounds=10)
    >>> [warmup.at(TopK(0.001), 1 << 20, number, {}).density for number in (0, 9, 10, 25, 35, 40)]
    [0.25, 0.25, 0.0625, 0.015625, 0.004, 0.001]
    """

    rounds: int
    densities: tuple[float, ...] = (0.25, 0.0625, 0.015625, 0.004)
    dense: Codec = Identity()

    def __post_init__(self) -> None:
        _check(self, self.rounds, self.dense)
        if not self.densities or not all(0 < density <= 1 for density in self.densities):
            raise ConfigurationError(
                f"DensityWarmup(densities={self.densities}): numbers above 0 and at most 1 are needed, such as (0.25, 0.0625)."
            )

    @property
    def changes(self) -> tuple[int, ...]:
        return tuple(self.rounds * (stage + 1) for stage in range(len(self.densities)))

    def codecs(self, codec: Codec) -> tuple[Codec, ...]:
        if not any(inner.sparse for inner in nested(codec)):
            raise ConfigurationError(
                f"{self} over {codec}: a codec that sends few of the values is needed, such as TopK(0.001)."
            )
        return (self.dense, *(_denser(codec, density) for density in self.densities), codec)

    def at(self, codec: Codec, numel: int, number: int, state: State) -> Codec:
        stage = bisect_right(self.changes, number)
        if stage == len(self.densities):
            return codec
        warm = _denser(codec, self.densities[stage])
        return warm if warm.nbytes(numel) < self.dense.nbytes(numel) else self.dense


def _denser(codec: Codec, density: float) -> Codec:
    """`codec` with at least this density in each part that has one."""
    return rebuilt(codec, lambda one: one.denser(density))


def _check(policy: object, rounds: int, dense: Codec) -> None:
    name = type(policy).__name__
    if type(rounds) is not int or rounds < 1:
        raise ConfigurationError(f"{name}(rounds={rounds!r}): a whole number of rounds, at least 1, is needed.")
    _check_dense(policy, dense)


def _check_dense(policy: object, dense: Codec) -> None:
    if not isinstance(dense, Codec) or isinstance(dense, type):
        name = type(policy).__name__
        raise ConfigurationError(f"{name}(dense={dense!r}): a Codec is needed, such as Identity() or Cast('bf16').")
