"""Digests of the anchors, which all replicas of a fixed group must hold with the same bits.

They differ if a bit has flipped in one replica's memory, or if a replica has sent unlike bytes to the others. Training goes on as if nothing
had happened then, and ends with different models; so a digest of each fragment is compared every few rounds and at the end, and checkpoints
have it, so that a resume takes a step at which all held the same.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial

import torch
from torch import Tensor

from thinwire.comm.group import Group
from thinwire.drivers.base import Training
from thinwire.drivers.flight import Flight
from thinwire.drivers.fragment import FragmentState
from thinwire.drivers.handshake import DIGEST_NBYTES, digest
from thinwire.drivers.token_weights import FactOfAll
from thinwire.errors import DisagreementError

# Inner steps between two digests of a fragment, if rounds are more frequent: one takes about a second a GB. Anchors that differ stay so.
_STEPS_BETWEEN = 32
_WHAT_TO_DO = (
    "A bit has flipped in the memory of a machine, or a replica has sent unlike bytes to the others (which need not be one of those that differ). "
    "Check the machines. Resume all from {last}: `thinwire resume RUN`, and checkpoint.newest_common in a loop of your own, take the newest "
    "step at which the anchors of all were equal."
)


class AnchorDigests:
    """Digests of the anchors of `training`, computed on a thread of its own when a round has landed, and sent with the next round."""

    def __init__(self, training: Training, group: Group) -> None:
        self._training, self._group = training, group
        self._rounds = max(
            1, _STEPS_BETWEEN // training.strategy.schedule.every
        )  # between two comparisons of a fragment
        self._thread = ThreadPoolExecutor(1, "thinwire-digest")
        self.begin()

    def begin(self) -> None:
        """Called when all replicas are known to hold equal anchors."""
        self._pending: dict[int, Future[bytes]] = {}  # by fragment
        self._equal = dict.fromkeys(range(len(self._training.fragments)), self._training.step)  # the last step known

    def landed(self, fragment: FragmentState) -> None:
        """Begin the digest of the anchor of `fragment`, if its next round compares it. The anchor does not change before that round lands."""
        if (fragment.rounds + fragment.index) % self._rounds == 0:
            anchor = fragment.anchor
            queued = torch.cuda.current_stream(anchor.device).record_event() if anchor.is_cuda else None
            self._pending[fragment.index] = self._thread.submit(_digest_beside_training, fragment, queued)

    def departs(self, flight: Flight, send: Callable[..., FactOfAll]) -> Callable[[], None] | None:
        """`send` the digest, if this round compares it. Returns a function that waits for the digests of all, and compares them."""
        own = self._pending.pop(flight.fragment.index, None)
        if own is None:
            return None
        sent = self._thread.submit(lambda: send(flight, 2, own.result(), "anchors"))  # after the digest, on its thread
        return partial(self._compare, flight, own, sent)

    def of_all(self) -> bytes:
        """The digest of all anchors together."""
        return digest(_anchors(self._training.fragments))

    def compare_all(self, gathered: Callable[[bytes, int, str], list[bytes]]) -> None:
        """Compare the anchors of all fragments. Collective. 8 bytes to each other replica, and 16 a fragment. Raises `DisagreementError`."""
        fragments = self._training.fragments
        own = b"".join(digest([anchor]) for anchor in _anchors(fragments))
        told = gathered(own, len(own), "anchors")
        for place, fragment in enumerate(fragments):
            part = slice(place * DIGEST_NBYTES, (place + 1) * DIGEST_NBYTES)
            self._check(fragment, [text[part] for text in told], f"at the end, after inner step {self._training.step}")

    def close(self) -> None:
        """Drop digests that have not begun."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _compare(self, flight: Flight, own: Future[bytes], sent: Future[FactOfAll]) -> None:
        """Raises `DisagreementError`, `LinkError`."""
        digests = sent.result().wait() | {self._group.rank: own.result()}
        when = f"before round {flight.round.number}, which departed after inner step {flight.round.departed}"
        self._check(flight.fragment, [digests[rank] for rank in range(self._group.size)], when)
        self._equal[flight.fragment.index] = flight.round.departed

    def _check(self, fragment: FragmentState, digests: Sequence[bytes], when: str) -> None:
        ranks = defaultdict(list)
        for rank, text in enumerate(digests):
            ranks[text].append(rank)
        if len(ranks) == 1:
            return
        camps = sorted(ranks.values(), key=lambda camp: (-len(camp), camp))
        if 2 * len(camps[0]) > len(digests):
            others = _names(sorted(rank for camp in camps[1:] for rank in camp))
            differ = (
                f"{others} {'differs' if len(others.split()) == 2 else 'differ'} from {_names(camps[0])}, the majority"
            )
        else:
            differ = f"{', '.join(map(_names, camps))} each hold another one, and none has a majority"
        step = min(self._equal.values())
        last = f"a checkpoint of step {step} or before" if step else "a checkpoint, or from the start if there is none"
        raise DisagreementError(
            f"the anchors of fragment {fragment.fragment.name!r} are no longer equal on all replicas ({when}): {differ}. "
            f"All were last known equal at step {step}. {_WHAT_TO_DO.format(last=last)}"
        )


def _names(ranks: Sequence[int]) -> str:
    return f"replica{'s' * (len(ranks) > 1)} {' and '.join(map(str, ranks))}"


def _anchors(fragments: Sequence[FragmentState]) -> Iterator[Tensor]:
    for fragment in fragments:
        yield fragment.anchor
        fragment.release()


@torch.no_grad()
def _digest_beside_training(fragment: FragmentState, queued: torch.cuda.Event | None) -> bytes:
    """The digest of the anchor. On a GPU the copy to the host follows `queued`, and runs beside later work of training."""
    if queued is None:
        return digest(_anchors([fragment]))
    anchor, stream = fragment.anchor, torch.cuda.Stream(fragment.anchor.device)  # type: ignore[no-untyped-call]
    with torch.cuda.stream(stream):
        queued.wait()
        anchor.record_stream(stream)
        return digest([anchor])
