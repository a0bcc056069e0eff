"""All timeouts between replicas.

They are a pure function of the schedule, the step time, the packets and the link. They are durations, so the clocks of two machines
are never compared.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from math import isfinite

from thinwire.comm.quantities import SECONDS, number_and_unit
from thinwire.comm.uplink import Link
from thinwire.errors import ConfigurationError
from thinwire.membership.registry import HEARTBEAT_TIMEOUT

BUFFERED = 1 << 20  # bytes of bulk data that may be queued before a heartbeat, measured: docs/experiments.md


@dataclass(frozen=True)
class Timeouts:
    """Timeouts in seconds. Use `Timeouts.of(...)`, and `dataclasses.replace` to change one.

    Args:
        heartbeat_interval: seconds between two heartbeats of a replica.
        heartbeat_timeout: seconds without a heartbeat after which a replica counts as dead.
        grace: seconds that members wait for a replica that is alive and late.
        connect: seconds to build a group.
        transfer: seconds for one message of a round.
        vote: seconds for the ballots of all members.
        view: seconds until the members have found each other.

    Raises:
        ConfigurationError: numbers that do not fit together.

    >>> Timeouts().heartbeat_timeout
    5.0
    """

    heartbeat_interval: float = 1.0
    heartbeat_timeout: float = HEARTBEAT_TIMEOUT
    grace: float = 10.0
    connect: float = 10.0
    transfer: float = 10.0
    vote: float = 15.0
    view: float = 60.0

    def __post_init__(self) -> None:
        for item in fields(self):
            value = getattr(self, item.name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not (isfinite(value) and value > 0):
                raise ConfigurationError(f"{item.name}={value!r}: a positive number of seconds is needed.")
        if self.heartbeat_timeout < 2 * self.heartbeat_interval:
            raise ConfigurationError(
                f"heartbeat_timeout={self.heartbeat_timeout:g} with heartbeat_interval={self.heartbeat_interval:g}: "
                "the timeout must allow for one lost heartbeat; choose at least twice the interval."
            )
        if self.vote < self.transfer:
            raise ConfigurationError(
                f"vote={self.vote:g} with transfer={self.transfer:g}: a member may vote that late; choose vote >= transfer."
            )

    @classmethod
    def of(
        cls,
        every: int,
        delay: int,
        step_seconds: float,
        nbytes: int,
        link: Link | None = None,
        grace: str | None = None,
    ) -> Timeouts:
        """Timeouts for rounds of `nbytes` on `link` (None: any). `nbytes` is what a replica sends to all peers in a round, at most.

        With H = `every`, τ = `delay`, T = `step_seconds`; air = seconds of nbytes on the link; rtt = 2 · its delay;
        queue = seconds of 1 MiB of bulk data on the link, which may be queued before a heartbeat:

            heartbeat_interval = 1
            heartbeat_timeout  = max(5, 3 · (interval + queue + rtt))
            grace              = max(2, τ·T − air − 10·rtt, H·T / 10)
            connect            = max(10, 40 · rtt + 3 · queue)
            transfer           = max(10, 4 · (air + rtt))
            vote               = transfer + max(5, 8 · rtt + 3 · queue)
            view               = H·T + grace + heartbeat_timeout + 2 · connect

        The grace is the slack of the schedule: a round that is so much later still lands in time. Without slack it is a tenth of the
        period, which is the most that one late replica can cost the others. A link that is four times slower than given still carries a
        round. A vote lasts longer than a peer's transfer, because a peer may vote only after it. A view lasts longer than a period,
        because the others may have just begun one. An argument `grace`, such as "5s" or "20 steps", replaces the computed grace.

        >>> Timeouts.of(every=100, delay=5, step_seconds=0.5, nbytes=10**6, link=Link.parse("10mbit,50ms")).grace
        5.0
        """
        given = {"every": every, "delay": delay, "step_seconds": step_seconds, "nbytes": nbytes}
        for name, value in given.items():
            if not (isfinite(value) and value >= 0):
                raise ConfigurationError(f"{name}={value!r}: a finite number of at least 0 is needed.")
        air = link.seconds(nbytes) if link else 0.0
        rtt = 2 * link.delay_seconds if link else 0.0
        queue = link.serialisation_seconds(BUFFERED) if link else 0.0
        period = every * step_seconds
        timeout = max(5.0, 3 * (1.0 + queue + rtt))
        slack = max(2.0, delay * step_seconds - air - 10 * rtt, period / 10)
        waits = slack if grace is None else grace_seconds(grace, step_seconds)
        connect = max(10.0, 40 * rtt + 3 * queue)
        transfer = max(10.0, 4 * (air + rtt))
        return cls(
            heartbeat_interval=1.0,
            heartbeat_timeout=timeout,
            grace=waits,
            connect=connect,
            transfer=transfer,
            vote=transfer + max(5.0, 8 * rtt + 3 * queue),
            view=period + waits + timeout + 2 * connect,
        )


def grace_seconds(text: str, step_seconds: float) -> float:
    """Seconds of "5s", "500ms" or, in inner steps of `step_seconds`, "20 steps". Raises `ConfigurationError`.

    >>> grace_seconds("20 steps", step_seconds=0.5), grace_seconds("500ms", step_seconds=0.5)
    (10.0, 0.5)
    """
    found = number_and_unit(text, SECONDS | dict.fromkeys(("step", "steps"), step_seconds))
    if found is None or not found[0] > 0:
        raise ConfigurationError(
            f"grace={text!r}: a time or a number of steps is needed, such as 5s, 500ms or '20 steps'."
        )
    return found[0] * found[1]
