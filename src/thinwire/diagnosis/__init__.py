"""What is wrong, and where: from what each replica wrote down of its rounds. Pure: records in, findings out."""

from thinwire.diagnosis.findings import Finding, Side, Syndrome
from thinwire.diagnosis.hang import Seen, stuck
from thinwire.diagnosis.records import Flow, Record
from thinwire.diagnosis.watch import Rules, Watch

__all__ = ["Finding", "Flow", "Record", "Rules", "Seen", "Side", "Syndrome", "Watch", "stuck"]
