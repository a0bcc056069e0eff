"""The loop of a replica whose neighbours meet in pairs: the order of operations around an inner step.

Time is virtual, in units of a mean inner step. All meetings follow from the seed (`Clocks`), so every replica knows them, and the two
replicas of a meeting wait only for each other. Meetings during an inner step come between its gradient and its update:

    forward, backward                  the gradient is of the weights before the meetings
    each meeting, in order of time     both flow to its time, send x, and move towards each other
    the update                         after a flow to the end of the step; x and x̃ take the same step

Events have the same order on all replicas, so no deadlock is possible. A replica that ends sends `END` instead of its next x to every
neighbour, which then continues without it. A request to stop spreads with the meetings. Time is divided into windows; in one window a
message reaches all replicas. A replica that wants to stop sends the request from the beginning of a window, and all stop after its end.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from thinwire.codecs import Codec, Identity
from thinwire.comm.group import Group, gather
from thinwire.drivers.attached import TAG, Attached
from thinwire.drivers.fragment import FragmentState
from thinwire.drivers.handshake import agree_on_start, check_start
from thinwire.drivers.module_state import clear
from thinwire.drivers.step_hooks import outermost
from thinwire.errors import CheckpointError, NonFiniteError
from thinwire.lab.gossip.consensus import mean_of_all
from thinwire.lab.pairs.composition import PairComposition
from thinwire.lab.topology import Clocks, PairEvent
from thinwire.packet import STOP, Header, empty_packet, identity, open_packet, payload, read_header, said_nbytes, seal
from thinwire.rng import Key
from thinwire.types import Observer

END = (1 << 32) - 1  # the part of a message whose sender has ended
_CODEC = identity(Identity())


class Pairing(Attached):
    """The loop of a method of pairs on one replica.

    ```python
    trained = a2cid2(topology=Ring()).attach(model, optimizer, group)
    while trained.progress < steps and not trained.stopping:   # progress is the mean over all replicas
        model(next(batches)).loss.backward()
        optimizer.step()                                       # meets neighbours, and takes its step
        optimizer.zero_grad()
    trained.finish()                                           # all replicas have the mean of all
    ```
    """

    strategy: PairComposition  # the method that attached it

    def __init__(
        self, method: PairComposition, model: nn.Module, optimizer: torch.optim.Optimizer, group: Group,
        observer: Observer, clock: Callable[[], float],
    ) -> None:  # fmt: skip
        super().__init__(method, model, optimizer, group, None, observer, clock)
        self.fragments = method.partition.fragments(model)
        self._clocks: Clocks = method.clocks(group.size, len(self.fragments))
        self._mixing = method.mixing(group.size)
        self.own_steps = len(set(method.slow)) > 1
        self.introduce({})
        self._states = [_hold(fragment, index, method.codec) for index, fragment in enumerate(self.fragments)]
        agree_on_start(group, [one.anchor for one in self._states], observer)
        check_start(self.fragments, [one.anchor for one in self._states])
        for one in self._states:
            one.load_into_parameters(one.anchor)
            if self._mixing.eta:
                one.exchange = {"ahead": one.anchor.clone()}
        self._at = [0.0] * len(self._states)  # the time to which each has flowed
        self._took = method.step_time(group.rank, group.size)
        self._neighbours = {int(peer) for peer in np.flatnonzero(self._clocks.rates[group.rank])}
        self._common = [  # by fragment and neighbour: the pair's common reference; differences from it are sent
            {} if method.codec == Identity() else {peer: one.anchor.clone() for peer in self._neighbours}
            for one in self._states
        ]
        self._over = dict.fromkeys(self._neighbours, 0.0)  # by neighbour: the time before which meetings are over
        self._window = (0, self._spread(0))
        self._says_stop = self._left = self._finished = False
        self._hooks = [
            optimizer.register_step_pre_hook(outermost(lambda *_: self._before_step())),
            optimizer.register_step_post_hook(outermost(lambda *_: self._after_step())),
        ]

    @property
    def evaluated(self) -> str:
        return "mean" if self._finished else "own"

    @property
    def progress(self) -> int:
        """Mean number of inner steps of all replicas."""
        return self.strategy.progress(self.group.rank, self.group.size, self.step)

    @property
    def now(self) -> float:
        """The time at which the last inner step ended."""
        return self.step * self._took

    # ---- around an inner step

    @torch.no_grad()
    def _before_step(self) -> None:
        began, until = self._clock(), (self.step + 1) * self._took  # the next `now`, to the bit
        for unit in range(int(self.now), int(until) + 1):
            for meeting in self._clocks.within(unit):
                if self.now < meeting.at <= until:
                    self._meet(meeting)
        for one in self._states:  # the anchor is x before the step
            x = self._flow(one, until)
            if self._mixing.eta:
                one.load_into_parameters(x)
        self.seconds += self._clock() - began

    @torch.no_grad()
    def _after_step(self) -> None:
        began = self._clock()
        self.step += 1
        if all(one.finite() for one in self._states):
            for one in self._states if self._mixing.eta else []:
                one.exchange["ahead"].add_(one.snapshot(torch.empty_like(one.anchor)).sub_(one.anchor))
        else:
            self._observe("warning", self.step, message="this step gave NaN or infinity in the weights; it is undone")
            for one in self._states:
                one.load_into_parameters(one.anchor)
            clear(self.model, self.optimizer)
        self._enter(self.now)
        if self._says_stop and self.now >= self._window[1] and not self._left:
            self._leave()
            self.stopping = True
        self.seconds += self._clock() - began

    def _flow(self, one: FragmentState, at: float) -> Tensor:
        """x at time `at`, which is also written to `anchor`; x̃ is moved to that time too."""
        x = one.snapshot(one.anchor)
        if self._mixing.eta:
            x, ahead = self._mixing.flowed(x, one.exchange["ahead"], at - self._at[one.index])
            self._at[one.index], one.anchor, one.exchange = at, x, {"ahead": ahead}
        return x

    # ---- a meeting

    def _meet(self, meeting: PairEvent) -> None:
        rank = self.group.rank
        if rank not in (meeting.one, meeting.other):
            return
        peer = meeting.other if rank == meeting.one else meeting.one
        if peer not in self._neighbours or meeting.at <= self._over[peer]:
            return
        self._enter(meeting.at)
        one = self._states[meeting.fragment]
        x = self._flow(one, meeting.at)
        if not bool(torch.isfinite(x).all()):
            raise NonFiniteError(
                f"weights in {one.fragment.name!r} hold NaN or infinity before replica {rank} meets replica {peer}; they must not be sent. "
                "Resume all from the last checkpoint, and write only finite values into the model."
            )
        header, common = self._header(meeting, rank, STOP * self._says_stop), self._common[meeting.fragment]
        packet, new = empty_packet(header.nbytes), x - common[peer] if common else x
        one.codec.encode(new, payload(packet), self._key(meeting, rank))
        own = self._decoded(meeting, rank, packet) if common else x
        seal(packet, header)
        other = self._swap({peer: packet}, one, meeting)[peer]
        if other is not None:
            x, ahead = self._mixing.met(x, one.exchange.get("ahead", x), own, other)
            if self._mixing.eta:
                one.exchange = {"ahead": ahead}
            if common:
                common[peer].add_(own + other, alpha=0.5)
        one.load_into_parameters(x)  # x at the time of the meeting, for any message of the peer

    def _key(self, meeting: PairEvent, sender: int) -> Key:
        return Key(self.strategy.seed, meeting.fragment, meeting.unit, sender, meeting.number)

    def _decoded(self, meeting: PairEvent, sender: int, packet: Tensor) -> Tensor:
        one = self._states[meeting.fragment]
        x = torch.full_like(one.anchor, -0.0)  # adding -0.0 changes no value, not even -0.0
        one.codec.decode_add(payload(packet), x, self._key(meeting, sender))
        return x

    def _swap(
        self, packets: Mapping[int, Tensor], one: FragmentState, meeting: PairEvent | None
    ) -> dict[int, Tensor | None]:
        """Exchange x with each peer; None for a peer that has ended. Raises `LinkError`, `PacketError`."""
        began, number = self._clock(), one.rounds
        one.rounds += 1
        largest = max(of.codec.nbytes(of.anchor.numel()) for of in self._states)
        rooms = {peer: empty_packet(largest) for peer in packets}
        transfer = self.group.post(TAG, packets, rooms, sized=said_nbytes)
        transfer.wait()
        arrived, fields = self._clock(), {"fragment": one.index, "round": number}
        heard = {peer: self._opened(peer, room, meeting) for peer, room in rooms.items()}
        if meeting:
            nbytes = sum(packet.numel() for packet in packets.values())
            self._observe("depart", self.step, **fields, nbytes=nbytes, seconds_spent=0.0)
            self._observe(
                "flight", self.step, **fields, nbytes=nbytes, begin=began, end=arrived,
                queued_seconds=transfer.queued_seconds, transfer_seconds=transfer.transfer_seconds,
            )  # fmt: skip
            waited = arrived - began
            self.stall_seconds += waited
            self._observe("land", self.step, **fields, begin=began, stall_seconds=waited, seconds_spent=0.0)
        return heard

    def _opened(self, peer: int, room: Tensor, meeting: PairEvent | None) -> Tensor | None:
        """The x that `peer` sent; None if it or this replica has ended."""
        packet = room[: said_nbytes(room)]
        if meeting is None or read_header(packet).part == END:
            if read_header(packet).part == END:
                open_packet(packet, _end(peer))
            self._neighbours.discard(peer)
            return None
        self._says_stop |= bool(open_packet(packet, self._header(meeting, peer)) & STOP)
        return self._decoded(meeting, peer, packet)

    def _header(self, meeting: PairEvent, sender: int, flags: int = 0) -> Header:
        codec, numel = self.strategy.codec, self._states[meeting.fragment].anchor.numel()
        nbytes = self._states[meeting.fragment].codec.nbytes(numel)
        return Header(identity(codec), sender, meeting.fragment, meeting.unit, meeting.number, numel, nbytes, flags)

    # ---- stopping, and the end

    def _enter(self, at: float) -> None:
        """Enter the window of time `at`; a request to stop that exists at its beginning is sent from then on."""
        while at >= self._window[1] and not self._says_stop:
            self._window = (self._window[1], self._spread(self._window[1]))
            self._says_stop = self._stop_requested

    def _spread(self, unit: int) -> int:
        """The time after `unit` in which a message of any replica reaches all."""
        near = np.eye(self.group.size, dtype=bool)
        while not near.all():
            for meeting in self._clocks.within(unit):
                near[[meeting.one, meeting.other]] = near[meeting.one] | near[meeting.other]
            unit += 1
        return unit + (self.group.size == 1)

    def _leave(self) -> None:
        """Tell the neighbours that this replica has ended."""
        self._left = True
        packets = {}
        for peer in sorted(self._neighbours):
            packets[peer] = empty_packet(0)
            seal(packets[peer], _end(self.group.rank))
        if packets:
            self._swap(packets, self._states[0], None)

    @torch.no_grad()
    def finish(self) -> None:
        """End the meetings, and take the mean over all replicas: 8·(M−1)/M bytes per parameter, once."""
        if self._finished:
            return
        if not self._left:
            self._leave()
        for one in self._states:
            own = one.snapshot(torch.empty_like(one.anchor))
            if self._mixing.eta:
                own = (own + one.exchange["ahead"]) / 2
            one.anchor = mean_of_all(self.group, own, Key(self.strategy.seed, one.index, 0, self.group.rank))
            one.load_into_parameters(one.anchor)
        self._finished = True
        self.close()

    # ---- save and resume

    def meet(self, group: Group, names: object = None) -> None:
        """Refused. Raises `CheckpointError`."""
        raise CheckpointError("replicas that meet two at a time keep their group; resume from checkpoints.")

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """x̃, the common references of the pairs, and their time; x is in the model."""
        tensors = {f"{one.index}.ahead": one.exchange["ahead"].clone() for one in self._states if one.exchange}
        for index, common in enumerate(self._common):
            tensors |= {f"{index}.common.{peer}": known.clone() for peer, known in common.items()}
        return tensors, {
            "step": self.step,
            "window": list(self._window),
            "rounds": [one.rounds for one in self._states],
        }

    def load_state(self, tensors: Mapping[str, Tensor], facts: Mapping[str, Any]) -> None:
        """Collective, before the first inner step. With equal speeds all resume at the same step, bit for bit. With unequal speeds a
        meeting that only one of two replicas has had is over for both, and their common reference begins at 0. Raises
        `CheckpointError`, `LinkError`.
        """
        self.step, self._window = int(facts["step"]), (int(facts["window"][0]), int(facts["window"][1]))
        self._at = [self.now] * len(self._states)
        for one, rounds in zip(self._states, facts["rounds"]):
            one.rounds = rounds
            if one.exchange:
                one.exchange = {"ahead": _kept(tensors, f"{one.index}.ahead", one)}
            for peer in self._common[one.index]:
                self._common[one.index][peer] = _kept(tensors, f"{one.index}.common.{peer}", one)
        times = [float(json.loads(told)) for told in gather(self.group, json.dumps(self.now).encode(), 32, "resume")]
        self._over = {peer: max(self.now, times[peer]) for peer in self._neighbours}
        for common in self._common:
            for peer, known in common.items():
                if times[peer] != self.now:
                    known.zero_()


def _hold(fragment: Any, index: int, codec: Codec) -> FragmentState:
    empty = torch.empty(fragment.numel)
    one = FragmentState(fragment, index, empty, {}, {}, codec.fitted(fragment.shapes))
    one.snapshot(empty)
    return one


def _kept(tensors: Mapping[str, Tensor], name: str, one: FragmentState) -> Tensor:
    """A copy of a checkpoint's tensor. Raises `CheckpointError` if it is not there, or not of this fragment's size."""
    kept = tensors.get(name)
    if kept is None or kept.numel() != one.anchor.numel():
        found = "no" if kept is None else kept.numel()
        raise CheckpointError(
            f"{name} has {found} elements in the checkpoint, {one.anchor.numel()} in this model; resume with the run's own model and settings."
        )
    return kept.clone()


def _end(sender: int) -> Header:
    return Header(_CODEC, sender, 0, 0, END, 0, 0)
