"""Differential privacy of a replica's deltas: clip, add noise, and account for it."""

from __future__ import annotations

import math
import secrets
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from thinwire.errors import ConfigurationError
from thinwire.pieces import guard

UNIT = "replica"  # the unit of protection: all data that one replica has trained on


@dataclass(frozen=True)
class Privacy(guard.Privacy):
    """User-level differential privacy of deltas, by the Gaussian mechanism:

        s_m = Δ_m · min(1, C / ‖Δ_m‖) + N(0, z²C²/M · I)      is encoded and sent, so that Σ_m s_m has noise N(0, z²C² · I)

    with C = `clip`, z = `noise`, M replicas. *The unit is a replica*: two runs are neighbours if they differ in one replica's deltas
    (zero in one of them), for any data and number of inner steps. A fragment's round is one release; several
    compose. To protect single examples, each example's gradient would have to be clipped, which is not done here.

    For an observer of the sums alone (the anchors, the trained model) the bound is `epsilon(rounds)`. A peer sees a replica's packet
    with only 1/M of the noise: `epsilon_of_packets(rounds, M)`. Both use Rényi divergence (extra `privacy`: Google's dp-accounting),
    without a gain from sampling, because all replicas are in all rounds.

    The noise of every round comes from the operating system's entropy, never from the run's seed, and is never reused: a resumed run
    draws new noise, and repeated rounds count again. *Order*: clip, noise, then the codec, which like any later step reveals nothing
    more. With error feedback older deltas would bypass the clip, so a strategy with `Feedback` is refused. Not covered: floating-point
    numbers are not the reals of the proof (Mironov, 2012); logs and checkpoints of a replica are not private; all replicas learn
    whether a delta was finite.

    *Source*: the mechanism of DP-FedAvg (McMahan et al., arXiv 1710.06963), on low-rank factors as DP-LoRA (arXiv 2312.17493).
    *Differs* from the latter: the unit, and an accountant instead of its closed bound.

    Args:
        clip: C, the norm to which each replica's delta is clipped.
        noise: z, the standard deviation of the noise divided by C.
        delta: δ of (ε, δ); far below 1 divided by the number of replicas.

    Raises:
        ConfigurationError: a setting cannot work; the message says what is needed.

    >>> Privacy(clip=0.5, noise=10.0).apply(torch.ones(4), size=1).shape
    torch.Size([4])
    """

    clip: float = 1.0
    noise: float = 1.0
    delta: float = 1e-5

    needs_fixed_group: ClassVar[str] = "shares its noise among replicas that must all be there"

    def __post_init__(self) -> None:
        if not (0 < self.clip < math.inf and 0 < self.noise < math.inf and 0 < self.delta < 1):
            raise ConfigurationError(
                f"{self}: a clip and a noise above 0, and a delta between 0 and 1, are needed; without noise nothing is private, and "
                "delta should be far below 1 over the number of replicas."
            )

    def apply(self, x: Tensor, size: int) -> Tensor:
        """Flat fp32 `x` clipped, with this replica's share of the noise of `size`; in place. NaN and infinities become NaN."""
        norm = float(torch.linalg.vector_norm(x, dtype=torch.float64))
        if not norm <= self.clip:
            x.copy_(x.double().mul_(self.clip / norm * (1 - 2.0**-20)))  # a little shorter, because fp32 rounds it
        share = self.noise * self.clip / math.sqrt(size)
        return x.add_(gaussian(x.numel()).mul_(share).to(x.device, torch.float32))

    def check(self) -> None:
        self.epsilon(1)  # raises an error if the accountant is not installed

    def epsilon(self, rounds: int) -> float:
        """ε at `delta` of `rounds` released sums. Raises `ConfigurationError` without dp-accounting."""
        return _epsilon(self.noise, rounds, self.delta)

    def epsilon_of_packets(self, rounds: int, size: int) -> float:
        """ε at `delta` for a peer that sees every packet of a replica among `size`."""
        return _epsilon(self.noise / math.sqrt(size), rounds, self.delta)

    def spent(self, rounds: int, size: int) -> dict[str, Any]:
        """Values for a summary: the bounds, the unit, and the number of rounds."""
        return {
            "unit": UNIT,
            "epsilon": self.epsilon(rounds),
            "epsilon_of_packets": self.epsilon_of_packets(rounds, size),
            "delta": self.delta,
            "rounds": rounds,
            "clip": self.clip,
            "noise": self.noise,
        }


def gaussian(count: int) -> Tensor:
    """Standard normal numbers in fp64 from the operating system's entropy (Box and Muller). Unlike those of a generator, they cannot be
    predicted from earlier ones.
    """
    pairs = (count + 1) // 2
    words = torch.frombuffer(bytearray(secrets.token_bytes(16 * pairs) or b"\0" * 8), dtype=torch.int64)[: 2 * pairs]
    uniform = words.bitwise_and((1 << 53) - 1).double().add_(0.5).mul_(2.0**-53)  # inside (0, 1)
    radius, angle = uniform[:pairs].log_().mul_(-2).sqrt_(), uniform[pairs:].mul_(2 * math.pi)
    return torch.cat([radius * angle.cos(), radius * angle.sin()])[:count]


def _epsilon(noise: float, rounds: int, delta: float) -> float:
    try:
        from dp_accounting import GaussianDpEvent
        from dp_accounting.rdp import RdpAccountant
    except ImportError as error:
        raise ConfigurationError(
            "a run with privacy needs an accountant; pip install 'thinwire[privacy]' (dp-accounting)."
        ) from error
    if rounds == 0:
        return 0.0
    accountant = RdpAccountant()
    accountant.compose(GaussianDpEvent(noise), rounds)
    return float(accountant.get_epsilon(delta))
