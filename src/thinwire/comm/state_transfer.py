"""Transfers tensors from one replica to another: safetensors in a frame, sent in pieces, and checked before use.

| bytes  | field    | meaning                                    |
|--------|----------|--------------------------------------------|
| 4      | magic    | `TWHO`                                     |
| 4      | version  | of this format                             |
| 8      | nbytes   | of the body                                |
| nbytes | body     | one safetensors file                       |
| 32     | digest   | BLAKE2b of the body                        |

All little-endian. The body holds names, shapes, dtypes, values, and the sender's facts as JSON in its metadata. The receiver
bounds the size; nothing is allocated beyond it. The format contains no code.

A transfer may take long: a model's state is some hundred times a round's packet. Other replicas of the group that wait for its end
(`stand_by`) get a message after every piece, so that no deadline of a single message must cover the whole transfer.

A receiver that has a part of the state already asks for the rest (`give_parts`; `take_facts`, `take_parts`): it gets the facts, which say
what there is, answers with one byte for each part (1: send it), and gets each of these parts in a frame of its own. So a transfer that was cut off
resumes with the next part, and the memory beside the state is that of one part.

If several replicas hold the state, `nearest` chooses the one that gives it: each receiver asks each of them for a probe, one after
another, and tells all how long it took. So all choose the same one.
"""

from __future__ import annotations

import hashlib
import json
import math
import struct
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from thinwire.comm.group import Group
from thinwire.errors import LinkError, PacketError

MAGIC = b"TWHO"
VERSION = 1
# bytes of one message: small, so that a long transfer shares the link, and each message is short
MESSAGE_NBYTES = 1 << 20
_LAYOUT = struct.Struct("<4sIQ")
_DIGEST = 32
_FACTS = "facts"
PROBE_NBYTES = 1 << 16  # takes longer than a small message's delay on links of up to 10 Mbit/s and 50 ms
_TAG, _TAG_OTHERS, _TAG_PROBE = 0x7A0, 0x7A1, 0x7A2
_FACTS_NBYTES = 1 << 25  # 1,024 rounds that counted 128 replicas with the longest names take 10 MB
_ENDED, _GOES_ON, _FAILED = range(3)


def give(group: Group, peers: Sequence[int], tensors: Mapping[str, Tensor], facts: Mapping[str, Any]) -> int:
    """Send `tensors` and `facts` (JSON) to each of `peers`, which call `take`. Returns the bytes sent. Raises `LinkError`."""
    return _give(group, peers, tensors, facts, ())


def give_parts(
    group: Group,
    peers: Sequence[int],
    parts: Sequence[Mapping[str, Tensor]],
    facts: Mapping[str, Any],
    others: Sequence[int] = (),
) -> int:
    """Send `facts` to each of `peers`, which call `take_facts` and `take_parts`, then the parts that each asks for, while `others` call
    `stand_by`. Returns the bytes sent. Raises `LinkError`, after it has told the others of the failure, if they can be reached.
    """
    with _told(group, others):
        nbytes = _give(group, peers, {}, facts, others)
        asked = {peer: _receive(group, peer, len(parts)) for peer in peers}
        for index, part in enumerate(parts):
            if asking := [peer for peer in peers if asked[peer][index]]:
                nbytes += _give(group, asking, part, {}, others)
    return nbytes


def take(group: Group, peer: int, limit: int) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Receive the tensors of `peer`, at most `limit` bytes. Raises `PacketError`, which names `peer` and the fault, and `LinkError`."""
    magic, version, nbytes = _LAYOUT.unpack(_receive(group, peer, _LAYOUT.size))
    if (magic, version) != (MAGIC, VERSION) or nbytes > limit:
        raise PacketError(
            f"replica {peer} began a state transfer with {magic!r}, version {version}, {nbytes:,} bytes; {MAGIC!r}, {VERSION} and at most "
            f"{limit:,} are expected. Run the same version and model on every replica."
        )
    body, digest = torch.empty(nbytes, dtype=torch.uint8), hashlib.blake2b(digest_size=_DIGEST)
    for piece in _pieces(body):
        group.post(_TAG, {}, {peer: piece}, "state transfer").wait()
        digest.update(piece.numpy().data)
    if _receive(group, peer, _DIGEST) != digest.digest():
        raise PacketError(
            f"the state transfer of replica {peer} was damaged in transit ({nbytes:,} bytes); it is requested again."
        )
    data = body.numpy().tobytes()
    try:
        tensors = load(data)
        facts = dict(json.loads(_metadata(data)[_FACTS]))
    except (SafetensorError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise PacketError(
            f"the state transfer of replica {peer} cannot be read ({error}); run the same version on every replica."
        ) from None
    return tensors, facts


def take_facts(group: Group, peer: int) -> dict[str, Any]:
    """Receive the facts of `peer`, which calls `give_parts`. `take_parts` is due then. Raises what `take` raises."""
    return take(group, peer, _FACTS_NBYTES)[1]


def take_parts(
    group: Group, peer: int, due: Collection[int], sizes: Sequence[int]
) -> Iterator[tuple[int, dict[str, Tensor]]]:
    """Ask `peer` for the parts that are `due`, of `len(sizes)`, and yield each when it has arrived.

    `sizes` are the bytes of the parts; a frame of more than twice as many is refused. Raises what `take` raises.
    """
    _send(group, [peer], bytes(index in due for index in range(len(sizes))))
    for index in sorted(due):
        yield index, take(group, peer, 2 * sizes[index] + _FACTS_NBYTES)[0]


def nearest(group: Group, donors: Sequence[int], takers: Sequence[int], clock: Callable[[], float]) -> int:
    """The one of `donors` whose probe took the least seconds to arrive, at that of the `takers` where it took longest. All members call
    it, and get the same result; no rank is in both. It takes Σ (round trip + `PROBE_NBYTES` / rate) over all pairs.

    Raises `LinkError`, and `PacketError` if a taker's times are no times.

    >>> from thinwire import run_threads
    >>> run_threads(3, lambda group: nearest(group, donors=[1], takers=[0], clock=lambda: 0.0))
    [1, 1, 1]
    """
    slowest = dict.fromkeys(donors, 0.0)
    layout = struct.Struct(f"<{len(donors)}d")
    for taker in takers:
        if group.rank == taker:
            times = [_probed(group, donor, clock) for donor in donors]
            told = torch.frombuffer(bytearray(layout.pack(*times)), dtype=torch.uint8)
            others = [rank for rank in range(group.size) if rank != taker]
            group.post(_TAG_PROBE, dict.fromkeys(others, told), {}, "state transfer").wait()
        else:
            if group.rank in donors:
                group.post(_TAG_PROBE, {}, {taker: torch.empty(1, dtype=torch.uint8)}, "state transfer").wait()
                probe = torch.zeros(PROBE_NBYTES, dtype=torch.uint8)
                group.post(_TAG_PROBE, {taker: probe}, {}, "state transfer").wait()
            told = torch.empty(layout.size, dtype=torch.uint8)
            group.post(_TAG_PROBE, {}, {taker: told}, "state transfer").wait()
        for donor, seconds in zip(donors, layout.unpack(told.numpy().tobytes())):
            if not 0 <= seconds < math.inf:
                raise PacketError(f"replica {taker} measured {seconds} seconds for a probe; check that replica.")
            slowest[donor] = max(slowest[donor], seconds)
    return min(donors, key=lambda donor: slowest[donor])


def _probed(group: Group, donor: int, clock: Callable[[], float]) -> float:
    """Ask `donor` for a probe. Returns the seconds until all of it is here."""
    probe, began = torch.empty(PROBE_NBYTES, dtype=torch.uint8), clock()
    group.post(_TAG_PROBE, {donor: torch.zeros(1, dtype=torch.uint8)}, {donor: probe}, "state transfer").wait()
    return clock() - began


def stand_by(group: Group, donor: int) -> None:
    """Wait until `donor` has finished its transfer to others. Raises `LinkError` if it failed, or `donor` is silent."""
    state, heard = _GOES_ON, torch.empty(1, dtype=torch.uint8)
    while state == _GOES_ON:
        group.post(_TAG_OTHERS, {}, {donor: heard}, "state transfer").wait()
        state = int(heard)
    if state != _ENDED:
        raise LinkError(
            f"the state transfer of replica {donor} to others failed; the round is dropped, and repeated without the replicas that left."
        )


def _give(
    group: Group, peers: Sequence[int], tensors: Mapping[str, Tensor], facts: Mapping[str, Any], others: Sequence[int]
) -> int:
    """Send one frame to each of `peers`. Returns the bytes sent."""
    whole = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    body = bytearray(save(whole, {_FACTS: json.dumps(facts)}))
    digest = hashlib.blake2b(digest_size=_DIGEST)
    _send(group, peers, _LAYOUT.pack(MAGIC, VERSION, len(body)))
    for piece in _pieces(torch.frombuffer(body, dtype=torch.uint8)):
        group.post(_TAG, {peer: piece for peer in peers}, {}, "state transfer").wait()
        digest.update(piece.numpy().data)
        _tell(group, others, _GOES_ON)
    _send(group, peers, digest.digest())
    return len(peers) * (_LAYOUT.size + len(body) + _DIGEST)


@contextmanager
def _told(group: Group, others: Sequence[int]) -> Iterator[None]:
    """Tell `others` whether the transfer inside ended without an error."""
    state = _FAILED
    try:
        yield
        state = _ENDED
    finally:
        _tell(group, others, state)


def _tell(group: Group, others: Sequence[int], state: int) -> None:
    if others:
        group.post(
            _TAG_OTHERS, dict.fromkeys(others, torch.tensor([state], dtype=torch.uint8)), {}, "state transfer"
        ).wait()


def _send(group: Group, peers: Sequence[int], data: bytes) -> None:
    message = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    group.post(_TAG, dict.fromkeys(peers, message), {}, "state transfer").wait()


def _receive(group: Group, peer: int, nbytes: int) -> bytes:
    message = torch.empty(nbytes, dtype=torch.uint8)
    group.post(_TAG, {}, {peer: message}, "state transfer").wait()
    return bytes(message.numpy().tobytes())


def _pieces(whole: Tensor) -> Iterator[Tensor]:
    for begin in range(0, whole.numel(), MESSAGE_NBYTES):
        yield whole[begin : begin + MESSAGE_NBYTES]


def _metadata(data: bytes) -> dict[str, str]:
    """The metadata of a safetensors file that was read without error: 8 bytes of length, then JSON."""
    (length,) = struct.unpack_from("<Q", data)
    return dict(json.loads(data[8 : 8 + length])["__metadata__"])
