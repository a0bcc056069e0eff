"""Counts how often a replica has sent something derived from its text, for privacy accounting."""

from __future__ import annotations

from collections import Counter

from thinwire.app.records.events import EventLog, Tail


def releases(log: EventLog, fragments: int) -> int:
    """An upper bound of the departures in all sessions of a run.

    A round that was repeated after a kill counts twice. For each kill, one departure of each fragment may be missing in the log, and so may
    events for which the log had no room: these are added.
    """
    told = Counter(event["event"] for event in Tail(log.path).events())
    return told["depart"] + fragments * (told["start"] - 1) + log.lost
