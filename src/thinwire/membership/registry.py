"""The state that a lighthouse or a hub keeps of an elastic run: live replicas, calls for a view, and shared keys.

It has no sockets: its owner names the replica of each request. A lighthouse's registry ends with its process, which does no harm:
replicas keep their group and call again. A hub's registry is on its disk (`Kept`). It is used from one event loop.
"""

from __future__ import annotations

import asyncio
import json
import math
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from thinwire.errors import PacketError
from thinwire.membership.channel import MOST_MEMBERS, MOST_PRESENCE
from thinwire.membership.commit import YES
from thinwire.membership.shared_keys import GROUP, NOTE, SharedKeys, TooMuchError

JOIN_SECONDS = 0.5  # from the first call, after which more than half are enough; memberships add their own grace
HEARTBEAT_TIMEOUT = 5.0
TICK_SECONDS = 0.05  # seconds between two calls of `tick`
MOST_REPORTS = 4  # lines of one member in a minute
MOST_OF_NAME = 4  # processes of one name: one that runs, and those that died and may still be heard
_DAY = 86_400.0


def quorum(
    calling: Mapping[str, float], heard: Mapping[str, str], previous: set[str], now: float, join: float
) -> set[str]:
    """The incarnations of the next view, from those that are `calling` (by the time since when) and those that were `heard` (with their
    names); empty: not yet. The rule of torchft 0.2.0, but it counts names: a name has one vote, however many processes it has.

    If all of the previous view call, the view is everyone who calls. If not, more than half of the names heard must call, and either all
    call, also those of which a process that died is still heard, or the first has waited for `join` seconds.

    >>> heard, previous = {"a": "oslo", "b": "lima", "c": "rome", "d": "rome"}, {"a", "b", "c"}
    >>> sorted(quorum({"a": 0.0, "b": 9.0, "c": 9.0}, heard, previous, now=9.0, join=10.0))
    ['a', 'b', 'c']
    >>> sorted(quorum({"a": 0.0, "b": 9.0}, heard, previous, now=9.0, join=10.0))
    []
    >>> sorted(quorum({"a": 0.0, "b": 9.0}, heard, previous, now=10.0, join=10.0))
    ['a', 'b']
    """
    here = calling.keys() & heard.keys()
    if previous and previous <= here:
        return here
    names, all_names = {heard[incarnation] for incarnation in here}, set(heard.values())
    if 2 * len(names) <= len(all_names):
        return set()
    waited = now - min(calling[incarnation] for incarnation in here) >= join
    return here if names == all_names or waited else set()


def nobody_comes(waiting: Collection[str], heard: Iterable[str], calling: Collection[str]) -> bool:
    """Whether the incarnations that are `waiting` for others of their view wait in vain: all others that were `heard` are calling for another
    view. If no other was heard, one may be on its way back.

    >>> nobody_comes({"a"}, {"a", "b", "c"}, {"b", "c"}), nobody_comes({"a"}, {"a", "b", "c"}, {"b"}), nobody_comes({"a"}, {"a"}, set())
    (True, False, False)
    """
    others = set(heard).difference(waiting)
    return bool(others) and others <= set(calling)


def will_not_vote(missing: Iterable[str], heard: Collection[str], calling: Collection[str]) -> bool:
    """Whether a vote waits in vain for the incarnations `missing`: each was not heard, or is calling for another view; or none is missing. It
    waits for one that may vote, although the outcome is no, so that those who will not are known.

    >>> will_not_vote({"a"}, {"b"}, {"b"}), will_not_vote({"b"}, {"a", "b"}, {"b"}), will_not_vote({"a", "b"}, {"a", "b"}, {"b"})
    (True, True, False)
    """
    return all(incarnation not in heard or incarnation in calling for incarnation in missing)


class Requester(Protocol):
    """A replica that asks: its name, which was authenticated, its incarnation, and its address."""

    name: str
    incarnation: str
    address: str

    async def came(self, future: asyncio.Future[Any], seconds: float) -> bool:
        """Whether `future` is done within `seconds`. Raises, or is cancelled, if the requester disconnects first."""


class Kept(Protocol):
    """What a registry keeps on a disk."""

    def present(self) -> str:
        """The value that `keep` wrote; "" if there is none, or no replica is alive."""

    def keep(self, present: str) -> None:
        """Write the replicas that are alive; it is on the disk when this returns."""

    def note(self, key: str) -> None:
        """Write a note; it is on the disk when this returns. Only the last ones are kept."""

    def notes(self) -> list[str]:
        """The notes that are kept."""


@dataclass
class _Replica:
    """One incarnation of a replica. `calls`: since when it has been calling for a view, and its status. `kept`: the process before this
    one knew it as alive, and it has not been heard since. `connected`: false if its connections have ended since it was heard.
    """

    name: str
    heard: float
    silent: bool = True
    kept: bool = False
    connected: bool = True
    calls: tuple[float, str | None] | None = None
    answer: asyncio.Future[list[list[str]]] | None = None

    @property
    def there(self) -> bool:
        """Whether its process is connected, as far as it is known."""
        return self.connected and not self.silent


class MemberRegistry:
    """Which replicas are alive. It calls `say` with a line for every join and leave, and `lost` with the name and the incarnation of one
    that fell silent.
    """

    def __init__(
        self, heartbeat_timeout: float = HEARTBEAT_TIMEOUT, say: Callable[[str], object] = lambda line: None
    ) -> None:
        self.heartbeat_timeout, self.say = heartbeat_timeout, say
        self.lost: Callable[[str, str], object] = lambda name, incarnation: None
        self.reported: Callable[[str, str], object] = lambda name, text: self.say(f"{name} reports: {text!a}")
        self._reports: dict[str, list[float]] = {}  # by name: when it reported in the last minute
        self._replicas: dict[str, _Replica] = {}  # by incarnation
        self._previous: set[str] = set()
        self._keys = SharedKeys()
        # The incarnation, and the keys that it waits for.
        self._waits: dict[asyncio.Future[None], tuple[str, list[str]]] = {}
        self._votes: dict[asyncio.Future[None], tuple[str, dict[str, str]]] = {}  # the outcome, and its ballots
        self._kept: Kept | None = None
        self._present = ""  # the replicas that are alive, as they were kept last

    def remember(self, kept: Kept) -> None:
        """Load what `kept` holds, and write changes to it from now on. Call it before anything else.

        Replicas that were alive when the process before this one ended count as heard now. Until each of them is back, has restarted, or was
        silent for too long, the others cannot form a view as if they were the whole run.
        """
        self._kept = kept
        for key in kept.notes():
            self._keys.note(key)
        self._present = kept.present()
        if self._present:
            there, previous = json.loads(self._present)
            now = time.monotonic()
            self._replicas = {incarnation: _Replica(name, now, False, True) for incarnation, name in there.items()}
            self._previous = set(previous)

    def revoke(self, names: Collection[str]) -> None:
        """Tell members that ask that these are revoked, so that none waits for them."""
        self._keys.revoked = names

    def hear(self, requester: Requester) -> _Replica:
        """Record that `requester` is alive. Raises `PacketError` if its incarnation belongs to another name, or there are too many replicas, or
        too many processes of its name.
        """
        if full := self.full(requester.incarnation, requester.name):
            raise PacketError(full)
        if requester.incarnation not in self._replicas:
            alike = [(other, each) for other, each in self._replicas.items() if each.name == requester.name]
            for other, replica in alike:
                if replica.kept or (len(alike) >= MOST_OF_NAME and not replica.there):
                    self._left(other, "it has restarted")
                    del self._replicas[other]
        replica = self._replicas.setdefault(requester.incarnation, _Replica(requester.name, 0.0))
        if replica.name != requester.name:
            raise PacketError(f"{requester.name} speaks as an incarnation of {replica.name}")
        if replica.silent:
            replica.silent = False
            self.say(f"joined: {requester.name} at {requester.address}")
        replica.heard, replica.kept, replica.connected = time.monotonic(), False, True
        return replica

    def disconnected(self, incarnation: str) -> None:
        """All connections of an incarnation have ended. No vote waits for it; views do, until it was silent for too long."""
        if replica := self._replicas.get(incarnation):
            replica.connected = False
            self._end_vain_votes()

    @property
    def empty(self) -> bool:
        """Whether no replica is here, and none is waited for."""
        return not self._replicas

    def full(self, incarnation: str, name: str) -> str:
        """Why there is no room for this incarnation of `name`; "" if there is."""
        if incarnation in self._replicas:
            return ""
        names = [each.name for each in self._replicas.values() if not each.kept and (each.name != name or each.there)]
        if names.count(name) >= MOST_OF_NAME:
            return f"{names.count(name)} processes of {name} are there already; every replica needs its own name"
        return f"{MOST_MEMBERS} replicas are there already" if len({*names, name}) > MOST_MEMBERS else ""

    def gone(self, name: str, incarnation: str, why: str) -> None:
        """Remove an incarnation of `name` whose connection has ended; it may connect again."""
        if (replica := self._replicas.get(incarnation)) and replica.name == name:
            self._left(incarnation, why)
            if replica.answer is None:  # otherwise it may only be frozen, and still waits
                del self._replicas[incarnation]

    def tick(self) -> None:
        """Drop replicas that are silent, answer the calls that make a view, and keep who is alive. Call it every `TICK_SECONDS`."""
        self._look()
        if self._kept:
            there = {incarnation: each.name for incarnation, each in self._replicas.items() if not each.silent}
            present = json.dumps([there, sorted(self._previous)]) if there else ""
            if present != self._present:
                self._kept.keep(present)  # may raise: then the next tick tries again
                self._present = present

    def _look(self) -> None:
        now = time.monotonic()
        for incarnation, replica in list(self._replicas.items()):
            if now - replica.heard >= self.heartbeat_timeout:
                self.gone(replica.name, incarnation, f"not heard for {self.heartbeat_timeout:g} s")
        self._end_vain_waits()
        self._end_vain_votes()
        self._call_together(now)

    def _begun(self, requester: Requester) -> bool:
        """Whether others of the last view are alive."""
        others = self._previous - {requester.incarnation}
        return any(not replica.silent for incarnation in others if (replica := self._replicas.get(incarnation)))

    def nobody_comes(self, waiting: Collection[str]) -> bool:
        """Whether `waiting`, incarnations of this run that wait to form a group, wait in vain: see the function of this name."""
        heard = {incarnation for incarnation, replica in self._replicas.items() if not replica.silent}
        calling = [incarnation for incarnation in heard if (calls := self._replicas[incarnation].calls) and calls[1]]
        return heard.issuperset(waiting) and nobody_comes(waiting, heard, calling)

    def _end_vain_waits(self) -> None:
        """End the waits for addresses of members of a group, if nobody comes."""
        waits: dict[str, list[asyncio.Future[None]]] = {}  # by group
        for future, (_, keys) in self._waits.items():
            if keys[0].startswith(GROUP) and not future.done():
                waits.setdefault(keys[0].split("/")[1], []).append(future)
        for futures in waits.values():
            if self.nobody_comes({self._waits[future][0] for future in futures}):
                for future in futures:
                    future.set_result(None)

    def _end_vain_votes(self) -> None:
        """End the waits for outcomes that are yes, for which all have voted, or for which those that have not will not vote."""
        votes = dict(self._votes.values())
        if not votes:
            return
        heard = {incarnation for incarnation, each in self._replicas.items() if each.connected and not each.silent}
        calling = {incarnation for incarnation, each in self._replicas.items() if each.calls}
        over = set[str]()
        for outcome, ballots in votes.items():
            missing = self._missing(ballots)
            if self._keys.read([outcome]) == [YES.decode()] or will_not_vote(missing, heard, calling):
                over.add(outcome)
        for future, (outcome, _) in self._votes.items():
            if outcome in over and not future.done():
                future.set_result(None)

    def _missing(self, ballots: Mapping[str, str]) -> set[str]:
        return {incarnation for key, incarnation in ballots.items() if self._keys.read([key]) is None}

    def _call_together(self, now: float) -> None:
        heard = {incarnation: replica.name for incarnation, replica in self._replicas.items() if not replica.silent}
        calling = {incarnation: replica.calls[0] for incarnation, replica in self._replicas.items() if replica.calls}
        # Whoever was alive when the process before this one ended may be on its way back.
        join = math.inf if any(replica.kept for replica in self._replicas.values()) else JOIN_SECONDS
        chosen = quorum(calling, heard, self._previous, now, join) if calling else set()
        if not chosen:
            return
        said = [(incarnation, self._replicas[incarnation].calls) for incarnation in sorted(chosen)]
        present = [
            [self._replicas[incarnation].name, incarnation, calls[1]]
            for incarnation, calls in said
            if calls and calls[1] is not None
        ]
        for incarnation in chosen:
            replica = self._replicas[incarnation]
            if replica.answer and not replica.answer.done():
                replica.answer.set_result(present)
            replica.calls = replica.answer = None
        self._previous = chosen
        self._keys.witnesses = 2 if len({heard[incarnation] for incarnation in chosen}) > 2 else 1

    async def answer(self, requester: Requester, said: dict[str, Any]) -> dict[str, Any]:
        """Answer one request."""
        match said:
            case {"do": "beat"}:
                self.hear(requester)
                return {"heartbeat_timeout": self.heartbeat_timeout} | (
                    {"begun": True} if self._begun(requester) else {}
                )
            case {"do": "leave"}:
                self.hear(requester)
                self._left(requester.incarnation, "it closed")
                del self._replicas[requester.incarnation]
            case {"do": "here", "who": str(incarnation)}:
                return {"here": incarnation in self._replicas and not self._replicas[incarnation].silent}
            case {"do": "call", "presence": str(text), "seconds": int() | float() as seconds}:
                return await self._call(requester, text, seconds)
            case {"do": "put" | "settle" as do, "key": str(key), "value": str(value), "members": members}:
                return self._write(requester, do, key, value, members)
            case {"do": "look", "keys": [str(key)], "seconds": int() | float() as seconds, "members": [_, *_] as view}:
                return await self._await_outcome(requester, key, seconds, view)
            case {"do": "look", "keys": [*keys], "seconds": int() | float() as seconds} if all(
                type(k) is str for k in keys
            ):
                return await self._look_up(requester, keys, seconds)
            case {"do": "values", "keys": [*keys]} if all(type(k) is str for k in keys):
                return {"values": self._keys.values(keys)}
            case {"do": "report", "text": str(text)}:
                self._report(requester.name, text)
            case {"do": "forget", "keys": [*keys]}:
                for key in keys:
                    if type(key) is str:
                        self._keys.forget(requester, key)
            case _:
                return {"error": "this request is not known; run the same version of Thinwire everywhere"}
        return {}

    def _report(self, name: str, text: str) -> None:
        """Pass on what a member says of the others, a few lines a minute from each."""
        now = time.monotonic()
        recent = self._reports[name] = [at for at in self._reports.pop(name, []) if now - at < 60.0]
        if len(self._reports) > MOST_MEMBERS:
            del self._reports[next(iter(self._reports))]
        if len(recent) < MOST_REPORTS:
            recent.append(now)
            self.reported(name, text[:300])

    def _left(self, incarnation: str, why: str) -> None:
        replica = self._replicas[incarnation]
        if not replica.silent:
            replica.silent = True
            self.say(f"left: {replica.name} ({why})")
            self.lost(replica.name, incarnation)

    async def _call(self, requester: Requester, text: str, seconds: float) -> dict[str, Any]:
        """Wait for a view; return its members with their statuses, or None if there was none in time."""
        if len(text) > MOST_PRESENCE or not text.isascii():
            return {
                "error": f"the status of a replica has {len(text)} bytes; at most {MOST_PRESENCE} are allowed, all ASCII"
            }
        replica, came = self.hear(requester), asyncio.get_running_loop().create_future()
        replica.calls, replica.answer = (time.monotonic(), text), came
        self._look()
        try:
            if await requester.came(came, min(max(0.0, seconds), _DAY)):
                return {"present": came.result()}
        except BaseException:
            if replica.answer is came:
                replica.calls = None
            raise
        finally:
            if replica.answer is came:
                replica.answer = None
        if replica.calls:
            replica.calls = replica.calls[0], None  # it is alive, but not in the next view
        return {"present": None}

    def _write(self, requester: Requester, do: str, key: str, value: str, members: object) -> dict[str, Any]:
        try:
            if do == "settle":
                told = {"value": self._keys.settle(requester, key, value, members)}
            else:
                told = {}
                self._keys.put(requester, key, value, members)
                if self._kept and key.startswith(NOTE) and self._keys.read([key]):
                    self._kept.note(key)
        except TooMuchError as error:
            return {"error": str(error)}
        for future, (_, keys) in self._waits.items():
            if not future.done() and self._keys.read(keys) is not None:
                future.set_result(None)
        self._end_vain_votes()
        return told

    async def _await_outcome(self, requester: Requester, key: str, seconds: float, members: object) -> dict[str, Any]:
        """Wait for the last ballot of the vote with the outcome `key`; settle it if all have voted. Its value is None if it is not settled,
        because time is over or those that are missing will not vote.
        """
        ballots = self._keys.ballots(requester, key, members)
        future = asyncio.get_running_loop().create_future()
        self._votes[future] = key, ballots
        self._end_vain_votes()
        try:
            await requester.came(future, min(max(0.0, seconds), _DAY))
        finally:
            del self._votes[future]
        if self._keys.read([key]) is None and not self._missing(ballots):
            try:
                self._keys.settle(requester, key, YES.decode(), members)
            except TooMuchError as error:
                return {"error": str(error)}
        return {"values": self._keys.read([key])}

    async def _look_up(self, requester: Requester, keys: list[str], seconds: float) -> dict[str, Any]:
        """Wait until all `keys` are written; return their values, or None if they are not in time."""
        if seconds > 0 and self._keys.read(keys) is None:
            future = asyncio.get_running_loop().create_future()
            self._waits[future] = requester.incarnation, keys
            try:
                await requester.came(future, min(seconds, _DAY))
            finally:
                del self._waits[future]
        return {"values": self._keys.read(keys)}
