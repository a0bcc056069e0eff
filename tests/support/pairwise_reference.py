"""Pairwise averaging in one thread, in the order of its events: what replicas that meet in pairs are compared with."""

from __future__ import annotations

from dataclasses import replace

import torch


class ReferenceRun:
    """A reference run in one thread in fp64 with the driver's own `Mixing` and `Clocks`.

    It keeps x, x̃ and the time of the last mixing flow of each replica.
    """

    def __init__(self, mixing, x):
        self.mixing, self.x, self.ahead, self.at = mixing, x.clone(), x.clone(), [0.0] * len(x)
        self.start, self.common = x[0].clone(), {}

    def flow(self, one, at):
        if self.mixing.eta:
            self.x[one], self.ahead[one] = self.mixing.flowed(self.x[one], self.ahead[one], at - self.at[one])
        self.at[one] = at

    def meet(self, one, other, at, coded=None):
        """Average the two replicas. With `coded`, each sends the coded difference to a value that both know.

        That value begins as the initial weights of replica 0.
        """
        self.flow(one, at)
        self.flow(other, at)
        said = [self.x[one].clone(), self.x[other].clone()]
        if coded:
            known = self.common.setdefault((one, other), self.start.clone())
            said = [coded(x - known, rank) for x, rank in zip(said, (one, other))]
            known.add_(said[0] + said[1], alpha=0.5)
        for rank, own, theirs in ((one, *said), (other, *said[::-1])):
            self.x[rank], self.ahead[rank] = self.mixing.met(self.x[rank], self.ahead[rank], own, theirs)

    def step(self, one, at, update):
        self.flow(one, at)
        self.x[one] += update
        self.ahead[one] += update

    @property
    def kept(self):
        return (self.x if not self.mixing.eta else (self.x + self.ahead) / 2).sum(0)


def coded_by(codec, key):
    """A function that encodes a vector with `codec` and returns what the receiver decodes."""

    def coded(x, rank):
        packet, out = torch.empty(codec.nbytes(x.numel()), dtype=torch.uint8), torch.zeros_like(x)
        codec.encode(x, packet, replace(key, sender=rank))
        codec.decode_add(packet, out, replace(key, sender=rank))
        return out

    return coded
