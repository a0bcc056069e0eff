"""Finds what is wrong, and where, from each replica's records of its rounds. Pure: records in, findings out."""

from thinwire.app.diagnosis.findings import Finding, Side, Syndrome
from thinwire.app.diagnosis.hang import Seen, stuck
from thinwire.app.diagnosis.watch import Rules, Watch
from thinwire.exchange.record import Flow, Record

__all__ = ["Finding", "Flow", "Record", "Rules", "Seen", "Side", "Syndrome", "Watch", "stuck"]
