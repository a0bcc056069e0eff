"""Finds what is wrong, and where, from each replica's records of its rounds. Pure: records in, findings out."""

from thinwire.diagnosis.findings import Finding, Side, Syndrome
from thinwire.diagnosis.hang import Seen, stuck
from thinwire.diagnosis.records import Flow, Record
from thinwire.diagnosis.watch import Rules, Watch

__all__ = ["Finding", "Flow", "Record", "Rules", "Seen", "Side", "Syndrome", "Watch", "stuck"]
