"""The state that all sound replicas share: anchors and outer state, the number of rounds, and the replicas that each round counted."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from thinwire.codecs import Codec, check_finite
from thinwire.data_ledger import Claim, DataLedger, Named, ReadCount, layout
from thinwire.elastic.plan import MOST_ROUNDS, MemberStatus, next_digest
from thinwire.errors import CheckpointError, DataError
from thinwire.pieces.partition import Fragment
from thinwire.runtime.fragment_state import FragmentState
from thinwire.types import State

REMEMBERED = 1024  # the last rounds, for which the counted replicas are kept


@dataclass
class GlobalState:
    """The state that all sound members share."""

    anchors: list[Tensor]
    states: list[State]
    round: int = 0
    state_digest: str = ""
    counted: dict[int, tuple[int, tuple[str, ...], str]] = field(
        default_factory=dict
    )  # by round: its fragment, the names that were counted, its mark
    run: str = ""  # identifies the run: the id of its first view
    ledger: DataLedger | None = None  # assigns samples to replicas; None: the replicas choose their data themselves

    def fragment(self, index: int, codec: Codec, feedback: State) -> FragmentState:
        """A `FragmentState` for a round: the shared state of a fragment, with this replica's `feedback`, and without parameters, which
        belong to the main thread."""
        return FragmentState(Fragment("", ()), index, self.anchors[index], self.states[index], feedback, codec)

    def tensors(self) -> dict[str, Tensor]:
        named = {f"{index}.anchor": anchor for index, anchor in enumerate(self.anchors)}
        return named | {
            f"{i}.outer.{name}": value for i, state in enumerate(self.states) for name, value in state.items()
        }

    def facts(self) -> dict[str, Any]:
        return {
            "round": self.round,
            "state_digest": self.state_digest,
            "run": self.run,
            "counted": {str(number): who for number, who in self.counted.items()},
            "ledger": layout.encoded(self.ledger).hex() if self.ledger else "",
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
            ledger = layout.decoded(bytes.fromhex(text)) if text else None
            if (ledger and ledger.terms) != (self.ledger and self.ledger.terms):
                raise ValueError("only one of both runs has a data ledger")
        except (DataError, KeyError, ValueError, TypeError, AttributeError, OverflowError) as error:
            raise CheckpointError(
                f"a transferred or saved state cannot be read ({error}); run the same version on every replica."
            ) from None
        self.round, self.state_digest, self.run, self.counted, self.ledger = number, state_digest, run, counted, ledger

    @property
    def mark(self) -> str:
        """Identifies the last committed round; a round of the same number in another history has another mark."""
        return self.state_digest[:8]

    def counts(self, number: int, name: str, fragment: int, mark: str = "") -> bool:
        """Whether round `number` exchanged `fragment`, counted the delta of `name`, and has the `mark`, if one is given. Also true if this
        round is forgotten: then the delta is perhaps lost, but not counted twice.
        """
        if number not in self.counted:
            return number < self.round - REMEMBERED
        index, who, there = self.counted[number]
        return index == fragment and name in who and mark in ("", there)

    def counted_since(self, number: int, name: str, fragment: int) -> bool:
        """Whether round `number` or a later one counted a delta of `name` of this fragment; also true if such rounds are forgotten."""
        rounds = ((index, who) for at, (index, who, _) in self.counted.items() if at >= number)
        return number < self.round - REMEMBERED or any(index == fragment and name in who for index, who in rounds)

    def commit(self, fragment: int, anchor: Tensor, state: State, who: tuple[str, ...]) -> None:
        """Store the anchor and outer state of `fragment` after a round that counted `who`."""
        self.anchors[fragment], self.states[fragment] = anchor, state
        self.state_digest = next_digest(self.state_digest, self.round, fragment, anchor)
        self.counted[self.round] = fragment, who, self.mark
        while (first := next(iter(self.counted))) <= self.round - REMEMBERED:
            del self.counted[first]

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
        """Store `ledger`, and add it to the state digest, so that members with different ledgers have different digests."""
        self.ledger = ledger
        text = f"{self.state_digest}/{layout.digest(ledger)}"
        self.state_digest = hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
        if self.round in self.counted:  # the mark of a round is the state after it
            self.counted[self.round] = *self.counted[self.round][:2], self.mark

    def take_over(self, tensors: Mapping[str, Tensor], facts: Mapping[str, Any], status: MemberStatus) -> None:
        """Take over the state of a sound member. Raises `CheckpointError`, and changes nothing, if the state belongs to another model, or
        differs from the member's `status`.
        """
        if (facts.get("round"), facts.get("state_digest")) != (status.round, status.state_digest):
            raise CheckpointError(
                "the transferred state does not have the digest that was announced; check that replica."
            )
        due = self.tensors()
        if {n: (t.shape, t.dtype) for n, t in tensors.items()} != {n: (t.shape, t.dtype) for n, t in due.items()}:
            raise CheckpointError(
                "the transferred state belongs to another model or outer step; start every replica with the same ones."
            )
        for tensor in tensors.values():
            check_finite(tensor)
        self.load(facts)
        self.anchors = [tensors[f"{i}.anchor"].to(a.device) for i, a in enumerate(self.anchors)]
        self.states = [
            {name: tensors[f"{i}.outer.{name}"].to(value.device) for name, value in state.items()}
            for i, state in enumerate(self.states)
        ]
