"""Eviction: most members vote to continue without a member that delays them.

Every status carries the member's record of its last round (exchange/record.py). So all members of a view have the same records,
reach the same diagnosis, and name the member that they suspect in their next status. A member that more than half of all members
name gets the reason, and leaves; the others continue without it. It may join again after the fault is corrected.

A member is not evicted if fewer than the membership's `least` would remain, if any member has finished training, or for a slow link,
because a link has two ends.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from thinwire.drivers.elastic.plan import MOST_RECORD, MemberStatus
from thinwire.drivers.rounds import StepTimer
from thinwire.errors import DisagreementError, LinkError, PacketError
from thinwire.exchange import Round
from thinwire.exchange.record import Record, Watch, recorded
from thinwire.membership.rendezvous import Membership
from thinwire.membership.view import View


def outvoted(suspects: Mapping[str, str], least: int) -> str | None:
    """The member that must leave, or None. `suspects` are the votes by member; "" is no vote. All members get the same result.

    >>> outvoted({"a": "c", "b": "c", "c": "", "d": "c"}, least=2)
    'c'
    >>> outvoted({"a": "c", "b": "c", "c": "", "d": ""}, least=2)  # half is no majority
    >>> outvoted({"a": "c", "b": "c", "c": ""}, least=3)  # two are too few
    """
    (name, votes), *_ = Counter(suspects.values()).most_common(1) or [("", 0)]
    enough = 2 * votes > len(suspects) and len(suspects) - 1 >= least
    return name if enough and name in suspects else None


class EvictionVoter:
    """One member's records and votes. No member is evicted unless the membership has rules (`Membership(evict=Rules())`)."""

    def __init__(self, membership: Membership, observe: Callable[..., None], clock: Callable[[], float]) -> None:
        self._membership, self._observe, self._clock = membership, observe, clock
        self._watch = membership.evict.watch() if membership.evict else None
        self._own_seconds, self._step_timer = 0.0, StepTimer()
        self._record = ""
        self._finding: Any | None = None
        self.put_out: set[str] = set()  # names of evicted members

    @property
    def suspect(self) -> str:
        return (self._finding.suspect or "") if self._finding else ""

    def departs(self, own_steps: int, seconds: float) -> None:
        """A delta departed at `seconds` of the membership's clock, after `own_steps` inner steps of this replica."""
        self._own_seconds = self._step_timer.departs(own_steps, seconds)

    @contextmanager
    def watches(self, round_: Round, view: View) -> Iterator[None]:
        """A context in which `round_` runs: records the fate of its messages. If this replica failed, its error is raised, and not the
        `LinkError` that follows when peers send nothing.
        """
        over = False
        try:
            yield
            over = True
        except LinkError:
            if own := round_.own_failure():
                raise own from None
            raise
        finally:
            record = round_.record([member.name for member in view.members], self._own_seconds, over)
            self._own_seconds = 0.0  # the speed is reported once, not again in rounds without training
            if self._membership.evict is not None:
                text = json.dumps(record.facts(), separators=(",", ":"))
                self._record = text if len(text) <= MOST_RECORD else ""
            if recorded(record.round) or not over:
                of_log = record.shifted(self._clock() - self._membership.clock())  # by the clock of all events
                self._observe("wire", **of_log.facts())

    def says(self) -> dict[str, str]:
        """Fields of the next status."""
        said, self._record = {"record": self._record, "suspect": self.suspect}, ""
        return said

    def judge(self, view: View, statuses: Sequence[MemberStatus]) -> str:
        """Count the votes. If a member must leave, this view is closed and holds no round: the others get the reason, and meet again; the
        evicted member leaves and raises `DisagreementError`. Returns "" if nobody must leave.
        """
        if self._watch is None:
            return ""
        names = [member.name for member in view.members]
        said = dict(zip(names, (status.suspect for status in statuses)))
        self._hear(self._watch, names, statuses)
        out = None if any(status.finishing for status in statuses) else outvoted(said, self._membership.least)
        if out is None:
            return ""
        by = sorted(name for name, suspect in said.items() if suspect == out)
        why = str(self._finding) if self.suspect == out else "by their records"
        self._observe("evicted", name=out, by=by, reason=why)
        self._watch.forget(out)
        self._finding = None
        self.put_out.add(out)
        if out == self._membership.name:
            self._membership.close()
            raise DisagreementError(
                f"replica {out!r} was evicted by {', '.join(by)}: {why}. Correct that and restart it; it takes over the others' state."
            )
        view.close()
        return f"{out} was evicted ({why}); the next round is without it"

    def _hear(self, watch: Watch, names: Sequence[str], statuses: Sequence[MemberStatus]) -> None:
        """Diagnose the records of one round: the last one that most members have records of."""
        records = [
            record for name, status in zip(names, statuses) if (record := _read(status.record, name)) is not None
        ]
        keys = Counter(record.key for record in records)
        if not keys:
            return
        key = max(keys, key=lambda k: (keys[k], k))
        found = watch.add([record for record in records if record.key == key])
        self._finding = next((finding for finding in found if finding.suspect in names), None)


def _read(text: str, name: str) -> Record | None:
    """The record in `text`; None if it is not a record of `name`."""
    try:
        record = Record.of(json.loads(text)) if 0 < len(text) <= MOST_RECORD else None
    except (PacketError, ValueError, RecursionError):
        return None
    return record if record is not None and record.name == name else None
