"""Topologies: which replica sends to which, with what weights, and how fast gossip over them brings replicas together."""

from thinwire.lab.topology.base import Topology, check_size, parts, spread
from thinwire.lab.topology.clocks import Clocks, PairEvent, meeting_rates, resistances
from thinwire.lab.topology.drawn import (
    BarabasiAlbert,
    ErdosRenyi,
    OnePeerExponential,
    RandomGroups,
    RandomPairs,
    RandomRegular,
)
from thinwire.lab.topology.fixed import Complete, Cut, Exponential, Listed, Mesh, MoshpitGrid, Ring, Torus, read_edges
from thinwire.lab.topology.rates import fewest_meetings, fitted_rates
from thinwire.lab.topology.spectrum import Spectrum, second, spectrum
from thinwire.lab.topology.weights import check_doubly, metropolis, mixing, outgoing

__all__ = [
    "BarabasiAlbert",
    "Clocks",
    "Complete",
    "Cut",
    "ErdosRenyi",
    "Exponential",
    "Listed",
    "Mesh",
    "MoshpitGrid",
    "OnePeerExponential",
    "PairEvent",
    "RandomGroups",
    "RandomPairs",
    "RandomRegular",
    "Ring",
    "Spectrum",
    "Topology",
    "Torus",
    "check_doubly",
    "check_size",
    "fewest_meetings",
    "fitted_rates",
    "meeting_rates",
    "metropolis",
    "mixing",
    "outgoing",
    "parts",
    "read_edges",
    "resistances",
    "second",
    "spectrum",
    "spread",
]
