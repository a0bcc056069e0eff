"""Counts how often a replica has sent something derived from its text, for privacy accounting."""

from __future__ import annotations

from thinwire.records.events import EventLog, read_events


def releases(log: EventLog, fragments: int) -> int:
    """An upper bound of the departures in all sessions of a run.

    A round that was repeated after a kill counts twice. For each kill, one departure of each fragment may be missing in the log, and so may
    events for which the log had no room: these are added.
    """
    told = [event["event"] for event in read_events(log.path)]
    return told.count("depart") + fragments * (told.count("start") - 1) + log.lost
