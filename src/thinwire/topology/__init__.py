"""Topologies: which replica sends to which, with what weights, and how fast gossip over them brings replicas together."""

from thinwire.topology.base import Topology, check_size, parts, spread
from thinwire.topology.drawn import ErdosRenyi, OnePeerExponential, RandomPairs, RandomRegular
from thinwire.topology.fixed import Complete, Exponential, Listed, Mesh, Ring, Torus, read_edges
from thinwire.topology.spectrum import Spectrum, contraction, second, spectrum
from thinwire.topology.weights import check_doubly, metropolis, mixing, outgoing

__all__ = [
    "Complete",
    "ErdosRenyi",
    "Exponential",
    "Listed",
    "Mesh",
    "OnePeerExponential",
    "RandomPairs",
    "RandomRegular",
    "Ring",
    "Spectrum",
    "Topology",
    "Torus",
    "check_doubly",
    "check_size",
    "contraction",
    "metropolis",
    "mixing",
    "outgoing",
    "parts",
    "read_edges",
    "second",
    "spectrum",
    "spread",
]
