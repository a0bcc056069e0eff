"""The samples of each replica: the order of an epoch, and a ledger of each replica's part of it."""

from typing import TYPE_CHECKING

from thinwire.lazy import lazily

if TYPE_CHECKING:
    from thinwire.data_ledger.lanes import LanesReader as LanesReader
    from thinwire.data_ledger.lanes import lanes_of as lanes_of
    from thinwire.data_ledger.ledger import Claim as Claim
    from thinwire.data_ledger.ledger import DataLedger as DataLedger
    from thinwire.data_ledger.ledger import Lease as Lease
    from thinwire.data_ledger.ledger import Named as Named
    from thinwire.data_ledger.ledger import ReadCount as ReadCount
    from thinwire.data_ledger.ledger import in_order as in_order
    from thinwire.data_ledger.order import Order as Order
    from thinwire.data_ledger.order import Permutation as Permutation
    from thinwire.data_ledger.order import part_of as part_of
    from thinwire.data_ledger.reader import FixedReader as FixedReader
    from thinwire.data_ledger.reader import LeasedReader as LeasedReader
    from thinwire.data_ledger.reader import Reader as Reader
    from thinwire.data_ledger.reader import drawn_for_ever as drawn_for_ever

_HOMES = {
    **dict.fromkeys(("LanesReader", "lanes_of"), "lanes"),
    **dict.fromkeys(("Claim", "DataLedger", "Lease", "Named", "ReadCount", "in_order"), "ledger"),
    **dict.fromkeys(("Order", "Permutation", "part_of"), "order"),
    **dict.fromkeys(("FixedReader", "LeasedReader", "Reader", "drawn_for_ever"), "reader"),
}
__all__ = sorted(_HOMES)
__getattr__ = lazily(__name__, _HOMES)
