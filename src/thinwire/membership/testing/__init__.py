"""A simulated cluster in virtual time: the real protocol, replicas as threads, and injected faults."""

from thinwire.membership.testing.cluster import SimulatedCluster

__all__ = ["SimulatedCluster"]
