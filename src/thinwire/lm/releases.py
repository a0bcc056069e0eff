"""How often a replica has told something of its text: what an accountant of privacy needs to know."""

from __future__ import annotations

from thinwire.records.events import EventLog, read_events


def releases(log: EventLog, fragments: int) -> int:
    """Departures in all sessions of a run; never too few.

    A round that was done again after a kill was told twice. One of each fragment may have left and not been written down before a
    kill, and so may what the log had no room for.
    """
    told = [event["event"] for event in read_events(log.path)]
    return told.count("depart") + fragments * (told.count("start") - 1) + log.lost
