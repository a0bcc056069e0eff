"""The state that all sound replicas share: anchors and outer state, the number of rounds, and the replicas that each round counted."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from thinwire.codecs import Codec, check_finite
from thinwire.data_ledger import Claim, DataLedger, Named, ReadCount, layout
from thinwire.drivers.elastic.plan import MOST_ROUNDS, MemberStatus
from thinwire.drivers.fragment import FragmentState
from thinwire.errors import CheckpointError, DataError
from thinwire.pieces.partition import Fragment
from thinwire.types import State

Record = Mapping[int, tuple[int, tuple[str, ...], str]]  # `GlobalState.counted`

# The last rounds, for which the counted replicas are kept. With fewer, replicas that are away for more rounds lose deltas; none is counted
# twice, because a forgotten round counts as one that counted the delta.
REMEMBERED = 1024


@dataclass
class GlobalState:
    """The state that all sound members share."""

    anchors: list[Tensor]
    states: list[State]
    round: int = 0
    state_digest: str = ""
    # by round: its fragment, the names that were counted, its mark
    counted: dict[int, tuple[int, tuple[str, ...], str]] = field(default_factory=dict)
    run: str = ""  # identifies the run: the id of its first view
    ledger: DataLedger | None = None  # assigns samples to replicas; None: the replicas choose their data themselves
    # by fragment: its version and tensors, from a transfer that was cut off, or from before a checkpoint was loaded
    arrived: dict[int, tuple[tuple[int, str], dict[str, Tensor]]] = field(default_factory=dict)
    _digests: dict[int, bytes] = field(
        default_factory=dict, repr=False
    )  # of the tensors of each fragment, once computed

    def __post_init__(self) -> None:
        if self.anchors and not self.state_digest:
            self.state_digest = self.computed_digest()

    def computed_digest(self) -> str:
        """The state digest: BLAKE2b, 16 bytes, as hexadecimal digits, of the anchors and outer states, the record of rounds, and the ledger. So
        whoever takes a state over can compute its digest from what has arrived.
        """
        state = hashlib.blake2b(json.dumps(list(self.counted.items())).encode(), digest_size=16)
        state.update((layout.digest(self.ledger) if self.ledger else "").encode())
        for index, part in enumerate(self.parts()):
            if index not in self._digests:
                self._digests[index] = digest_of(part)
            state.update(self._digests[index])
        return state.hexdigest()

    def use_computed_digest(self) -> None:
        """Take the digest of what this state holds, in place of one that was read."""
        self.state_digest = self.computed_digest()

    def fragment(self, index: int, codec: Codec, feedback: State) -> FragmentState:
        """A `FragmentState` for a round: the shared state of a fragment, with this replica's `feedback`, and without parameters, which
        belong to the main thread."""
        return FragmentState(Fragment("", ()), index, self.anchors[index], self.states[index], feedback, codec)

    def parts(self) -> list[dict[str, Tensor]]:
        """Anchor and outer state of each fragment, by name."""
        return [
            {f"{i}.anchor": anchor} | {f"{i}.outer.{name}": value for name, value in state.items()}
            for i, (anchor, state) in enumerate(zip(self.anchors, self.states))
        ]

    def facts(self) -> dict[str, Any]:
        return {
            "round": self.round,
            "state_digest": self.state_digest,
            "run": self.run,
            "counted": {str(number): who for number, who in self.counted.items()},
            "ledger": layout.encode(self.ledger).hex() if self.ledger else "",
        }

    def load(self, facts: Mapping[str, Any]) -> None:
        """Take round, digest, run, record and ledger of `facts()`. Raises `CheckpointError`, and changes nothing then."""
        try:
            number, state_digest, run = int(facts["round"]), str(facts["state_digest"]), str(facts.get("run", ""))
            counted = {
                int(key): (int(index), tuple(map(str, who)), str(mark))
                for key, (index, who, mark) in facts["counted"].items()
            }
            if not 0 <= number < MOST_ROUNDS:
                raise ValueError(f"its round is {number}; 0 to {MOST_ROUNDS - 1} is needed")
            text = facts["ledger"]
            ledger = layout.decode(bytes.fromhex(text)) if text else None
        except (DataError, KeyError, ValueError, TypeError, AttributeError, OverflowError) as error:
            raise CheckpointError(
                f"a transferred or saved state cannot be read ({error}); run the same version on every replica."
            ) from None
        if other := _other_data(ledger, self.ledger):
            raise CheckpointError(
                f"a transferred or saved state belongs to other data: {other}; every replica needs the data with which the run began."
            )
        self.round, self.state_digest, self.run, self.counted, self.ledger = number, state_digest, run, counted, ledger

    @property
    def mark(self) -> str:
        """Identifies the last committed round; a round of the same number in another history has another mark."""
        return self.counted[max(self.counted)][2] if self.counted else ""

    def counts(self, number: int, name: str, fragment: int, mark: str = "") -> bool:
        """Whether round `number` exchanged `fragment`, counted the delta of `name`, and has the `mark`, if one is given. Also true if this
        round is forgotten: then the delta is perhaps lost, but not counted twice.
        """
        if number not in self.counted:
            return number < self.round - REMEMBERED
        index, who, there = self.counted[number]
        return index == fragment and name in who and mark in ("", there)

    def counted_unlike(self, known: Record, number: int, name: str, fragment: int) -> bool:
        """Whether round `number` counted a delta of `name` of this fragment, and is not the round of that number in the record `known`."""
        index, who, _ = there = self.counted.get(number, (-1, (), ""))
        return index == fragment and name in who and there != known.get(number)

    def counted_since(self, number: int, name: str, fragment: int, known: Record = MappingProxyType({})) -> bool:
        """Whether round `number` or a later one counted a delta of `name` of this fragment, and is not in the record `known`; also true if such
        rounds are forgotten.
        """
        since = [at for at in self.counted if at >= number]
        return number < self.round - REMEMBERED or any(self.counted_unlike(known, at, name, fragment) for at in since)

    def commit(self, fragment: int, anchor: Tensor, state: State, who: tuple[str, ...]) -> None:
        """Store the anchor and outer state of `fragment` after a round that counted `who`."""
        self.anchors[fragment], self.states[fragment] = anchor, state
        self._digests[fragment] = digest_of(self.parts()[fragment])
        before = json.dumps([self.state_digest, self.round, fragment, who]).encode()
        mark = hashlib.blake2b(before + self._digests[fragment], digest_size=4).hexdigest()
        self.counted[self.round] = fragment, who, mark
        while (first := next(iter(self.counted))) <= self.round - REMEMBERED:
            del self.counted[first]
        self.state_digest = self.computed_digest()

    def begin_data(self, names: Iterable[str]) -> None:
        """Give the members of the first view their leases, if this has not been done."""
        if self.ledger is not None and not self.ledger.leases:
            self.set_ledger(self.ledger.begin(names))

    def commit_data(self, fragment: int, claims: Mapping[str, Claim], present: Mapping[str, ReadCount]) -> Named:
        """Update the ledger after a round; see `DataLedger.commit`."""
        assert self.ledger is not None
        ledger, named = self.ledger.commit(fragment, claims, present)
        self.set_ledger(ledger)
        return named

    def set_ledger(self, ledger: DataLedger) -> None:
        """Store `ledger`. Members with different ledgers have different state digests."""
        self.ledger = ledger
        self.state_digest = self.computed_digest()

    def read(self, facts: Mapping[str, Any]) -> GlobalState:
        """The state of another member by its `facts()`, without its tensors. Raises `CheckpointError`."""
        other = GlobalState([], [], ledger=self.ledger)
        other.load(facts)
        return other

    def missing(self, other: GlobalState) -> set[int]:
        """The fragments that the member with the state `other` must send, so that this replica has its state.

        These are the fragments that moved in rounds which this replica does not have, if both have the same history up to its last round;
        otherwise, or if that round is forgotten, all. A fragment that has `arrived` at its version is not among them.
        """
        due, last = set(range(len(self.anchors))), max(self.counted, default=-1)
        if self.run == other.run and last in other.counted and self.counted[last] == other.counted[last]:
            due = {fragment for number, (fragment, _, _) in other.counted.items() if number > last}
        return {index for index in due if index not in self.arrived or self.arrived[index][0] != other.version(index)}

    def version(self, fragment: int) -> tuple[int, str]:
        """Identifies the anchor and outer state of `fragment`: the last round that moved it and this round's mark; or -1 and the run."""
        moved = [(number, mark) for number, (index, _, mark) in self.counted.items() if index == fragment]
        return max(moved, default=(-1, self.run))

    def arrive(self, fragment: int, part: dict[str, Tensor], other: GlobalState) -> None:
        """Keep the tensors of `fragment`, sent by the member with the state `other`, until `take_over`. Raises `CheckpointError`, and changes
        nothing, if they belong to another model.
        """
        due = self.parts()[fragment]
        if {n: (t.shape, t.dtype) for n, t in part.items()} != {n: (t.shape, t.dtype) for n, t in due.items()}:
            raise CheckpointError(
                "the transferred state belongs to another model or outer step; start every replica with the same ones."
            )
        for tensor in part.values():
            check_finite(tensor)
        self.arrived[fragment] = other.version(fragment), part

    def keep(self, other: GlobalState) -> None:
        """Keep the fragments of `other` as if they had arrived: a replica that has joined takes its own checkpoint then, and needs them again."""
        self.arrived = {index: (other.version(index), part) for index, part in enumerate(other.parts())}

    def take_over(self, other: GlobalState, status: MemberStatus) -> None:
        """Take over the state `other` of a sound member, whose fragments have arrived. Raises `CheckpointError`, and changes nothing but
        `arrived`, if what has arrived does not have the digest in the member's `status`.
        """
        anchors, states, digests = list(self.anchors), list(self.states), dict(self._digests)
        for i, (version, part) in self.arrived.items():
            if version == other.version(i):
                digests.pop(i, None)
                anchors[i] = part[f"{i}.anchor"].to(anchors[i].device)
                states[i] = {name: part[f"{i}.outer.{name}"].to(value.device) for name, value in states[i].items()}
        there = GlobalState(
            anchors, states, other.round, other.state_digest, other.counted, other.run, other.ledger, _digests=digests
        )
        announced = status.round, status.state_digest
        if (other.round, other.state_digest) != announced or there.computed_digest() != status.state_digest:
            self.arrived = {}  # whose bytes they are is not known
            raise CheckpointError(
                "the transferred state does not have the digest that was announced; check that replica."
            )
        self.anchors, self.states, self._digests = anchors, states, there._digests
        self.round, self.state_digest, self.run = other.round, other.state_digest, other.run
        self.counted, self.ledger, self.arrived = other.counted, other.ledger, {}


def digest_of(part: Mapping[str, Tensor]) -> bytes:
    """BLAKE2b, 16 bytes, of the tensors of one fragment by name."""
    state = hashlib.blake2b(digest_size=16)
    for name, tensor in sorted(part.items()):
        values = tensor.detach().cpu().contiguous().reshape(-1)
        state.update(f"{name} {values.dtype} {values.numel()}/".encode())
        state.update(values.view(torch.uint8).numpy().data)
    return state.digest()


def _other_data(there: DataLedger | None, here: DataLedger | None) -> str:
    """How the terms of two ledgers differ; empty if they do not."""
    if there is None or here is None:
        return "" if there is here else "only one of both runs has a reader that assigns samples to replicas"
    if there.samples != here.samples:
        return f"{there.samples:,} samples in an epoch there, {here.samples:,} here"
    return "" if there.terms == here.terms else f"the terms of its data ledger are {there.terms}, here {here.terms}"
