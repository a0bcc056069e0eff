"""The samples of each replica: the order of an epoch, and a ledger of each replica's part of it."""

from thinwire.data_ledger.lanes import LanesReader, lanes_of
from thinwire.data_ledger.ledger import Claim, DataLedger, Lease, Named, ReadCount, in_order
from thinwire.data_ledger.order import Order, Permutation, part_of
from thinwire.data_ledger.reader import FixedReader, LeasedReader, Reader, drawn_for_ever

__all__ = [
    "Claim",
    "DataLedger",
    "FixedReader",
    "LanesReader",
    "Lease",
    "LeasedReader",
    "Named",
    "Order",
    "Permutation",
    "ReadCount",
    "Reader",
    "drawn_for_ever",
    "in_order",
    "lanes_of",
    "part_of",
]  # fmt: skip
