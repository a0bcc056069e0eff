"""Straight streams between members: the same bytes as by the hub, no message lost with a stream, and one choice for all."""

from __future__ import annotations

import dataclasses
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
from group_laws import TIMEOUT, Exchange, free_port
from raw_member import RawMember, admitted, welcomed
from secure_groups import digest_of_trained, run_secure
from tcp_proxy import Proxy

import thinwire as tw
from thinwire.net import Hub, frames, heartbeats, join, link
from thinwire.net.frames import group_label
from thinwire.net.heartbeats import BEATS
from thinwire.net.star_or_mesh import Measured
from thinwire.net.straight import Straight

NBYTES = 1_000_000
PAYLOAD = 5 * NBYTES


@pytest.fixture
def mesh(monkeypatch):
    """Any announced measurement chooses straight streams, whatever else this machine does."""
    monkeypatch.setattr(Measured, "straight", lambda self, nbytes, receivers: True)


class InStep:
    """Members, each a thread, that exchange packets until all are ready."""

    def __init__(self, size: int) -> None:
        self._barrier, self._said = threading.Barrier(size), {}

    def until(self, group, ready) -> int:
        """Returns the number of rounds until `ready(group)` held on all members."""
        rounds = 0
        while True:
            Exchange(group, 1, rounds % 50, 20_000).check()
            rounds += 1
            self._said[group.rank] = ready(group)
            self._barrier.wait(TIMEOUT)
            over = all(self._said.values())
            self._barrier.wait(TIMEOUT)
            if over:
                return rounds


def trained(group):
    """Its packets are too long for the control stream."""
    return digest_of_trained(group, hidden=4096, batch=8, steps=12)


def measured(directions: int):
    return lambda group: f"the worst of {directions})" in group.describe()


def test_training_over_straight_streams_changes_no_bit(tmp_path, mesh):
    """Only one of three members listens: its packets go straight to both, and those of the others to each other by the hub."""
    step, told = InStep(3), {}

    def replica(group):
        step.until(group, measured(4))
        before = group.uploaded, group.sent_straight
        result = trained(group)
        told[group.rank] = group.uploaded - before[0], group.sent_straight - before[1], group.describe()
        step.until(group, lambda _: True)
        return result

    with Hub(tmp_path / "hub") as hub:
        ended = run_secure(hub.invite(3), 3, replica, tmp_path / "keys", listens={0: ("127.0.0.1:0", "")})
    assert ended == tw.run_threads(3, trained)
    by_hub, straight, texts = zip(*(told[rank] for rank in range(3)))
    assert straight[0] == straight[1] + straight[2] and straight[1] == straight[2]
    assert by_hub[0] < 0.3 * straight[0] and by_hub[1] > straight[1]
    assert len({text.partition("Chosen:")[2] for text in texts}) == 1
    assert "Chosen: mesh for " in texts[0] and "round trips" in texts[0]


def test_the_announced_numbers_decide_for_every_member(tmp_path):
    """The measured choice is that of the closed forms, whichever it is here; an uplink carries no packet more often than it says."""
    step = InStep(2)

    def replica(group):
        step.until(group, measured(2))
        found, _ = group._link.straight._found
        before = group.uploaded, group.sent_straight
        Exchange(group, 2, 0, NBYTES).check()
        step.until(group, lambda _: True)
        return found, group.uploaded - before[0], group.sent_straight - before[1]

    with Hub(tmp_path / "hub") as hub:
        at = ("127.0.0.1:0", "")
        (found, *first), (same, *second) = run_secure(
            hub.invite(2), 2, replica, tmp_path / "keys", listens={0: at, 1: at}
        )
    assert found == same
    for by_hub, straight in (first, second):
        assert (
            (straight if found.straight(NBYTES, 1) else by_hub)
            > NBYTES
            > 10 * (by_hub if found.straight(NBYTES, 1) else straight)
        )
        assert by_hub + straight < 1.1 * NBYTES


class Spoilt:
    """Two replicas exchange `PAYLOAD` bytes each way over straight streams that `spoil` breaks. Then these are mended, and packets go
    straight again. `by_hub` and `straight` have the bytes that each replica sent in the exchange.
    """

    def __init__(self, folder: Path, spoil: Callable[[Proxy], Callable[[], None]]) -> None:
        """`spoil` returns what is done while the exchange goes on."""
        step, port = InStep(2), free_port()
        with Hub(folder / "hub") as hub, Proxy(dataclasses.replace(hub.invite(), port=port)) as proxy:

            def replica(group):
                step.until(group, measured(2))
                before = group.uploaded, group.sent_straight
                during = spoil(proxy) if group.rank == 0 else lambda: None
                step.until(group, lambda _: True)
                exchange = Exchange(group, 2, 0, PAYLOAD)
                during()
                exchange.check()
                step.until(group, lambda _: True)  # a send ends with its last chunk, which may have to be sent again
                sent = group.uploaded - before[0], group.sent_straight - before[1]
                proxy.upwards = proxy.downwards = bytes
                proxy.mend()
                straight = group.sent_straight
                step.until(group, lambda group: group.sent_straight > straight)
                return sent

            listens = {0: (f"127.0.0.1:{port}", f"127.0.0.1:{proxy.token.port}")}
            sent = run_secure(hub.invite(2), 2, replica, folder / "keys", listens=listens)
        self.by_hub, self.straight = zip(*sent)


def test_a_stream_cut_in_the_middle_loses_no_message(tmp_path, mesh):
    """What was not acknowledged continues by the hub, and packets go straight again when a stream stands again."""

    def spoil(proxy: Proxy) -> Callable[[], None]:
        begun = proxy.forwarded

        def hold(data: bytes) -> bytes:
            if proxy.forwarded > begun + NBYTES:
                proxy.held.clear()
            return data

        def cut() -> None:
            proxy.wait(lambda: proxy.forwarded > begun + NBYTES)
            proxy.cut()
            proxy.upwards = bytes
            proxy.held.set()

        proxy.upwards = hold
        return cut

    spoilt = Spoilt(tmp_path, spoil)
    assert PAYLOAD - 2 * NBYTES < spoilt.by_hub[1] < 1.01 * PAYLOAD


def test_a_stream_whose_route_vanishes_in_silence_loses_no_message(tmp_path, mesh, monkeypatch):
    """A router swallows all bytes of the streams, their ends too. Each end notices by its own bound alone, and packets go by the hub until
    a stream stands again.
    """
    monkeypatch.setattr(link, "Straight", lambda *given: Straight(*given[:3], silent=2.0))
    passed = [0]

    def spoil(proxy: Proxy) -> Callable[[], None]:
        def swallow(data: bytes) -> bytes:
            with proxy.changed:  # several threads count
                passed[0] += len(data)
                if passed[0] > NBYTES:
                    proxy.forget(refuse=True)
            return data

        proxy.upwards = proxy.downwards = swallow
        return lambda: None

    spoilt = Spoilt(tmp_path, spoil)
    assert all(PAYLOAD - 2 * NBYTES < sent < 1.01 * PAYLOAD for sent in spoilt.by_hub), spoilt.by_hub


def test_a_stream_in_which_nothing_moves_is_kept_while_the_other_end_is_reached(tmp_path, mesh, monkeypatch):
    """Bulk stands still for three times the bound of silence, as on a link that is far too slow for it. The beats pass."""
    monkeypatch.setattr(link, "Straight", lambda *given: Straight(*given[:3], silent=1.0))
    monkeypatch.setattr(heartbeats, "MISSED", 10**9)  # however late this machine is
    carried, beats, go = Counter[int](), Counter[int](), threading.Event()

    def spoil(proxy: Proxy) -> Callable[[], None]:
        def stall(data: bytes) -> bytes:
            thread = threading.get_ident()  # one for each direction of each connection
            carried[thread] += len(data)
            if carried[thread] > 1 << 16:
                go.wait(TIMEOUT)
            with proxy.changed:
                beats[thread] += 1
            return data

        def slow() -> None:
            proxy.wait(lambda: sum(count >= 3 * BEATS for count in list(beats.values())) >= 2)
            go.set()

        proxy.upwards = proxy.downwards = stall
        return slow

    spoilt = Spoilt(tmp_path, spoil)
    assert all(sent < 0.1 * PAYLOAD for sent in spoilt.by_hub) and all(sent > PAYLOAD for sent in spoilt.straight)


def test_a_member_of_the_previous_frames_gets_none_that_it_does_not_know(tmp_path):
    with Hub(tmp_path / "hub") as hub:
        token = hub.invite(2)
        with RawMember(token, admitted(token, "old", tmp_path / "keys"), group_label(2, "")) as old:
            old.stated, old.version = "4 to 4 (Thinwire 0.1.0)", 4
            stream = old.hello(2)

            def replica() -> None:
                with join(str(token), "young", 2, tmp_path / "keys", "", TIMEOUT, listen="127.0.0.1:0") as group:
                    told.append(group.describe())

            told: list[str] = []
            thread = threading.Thread(target=replica)
            thread.start()
            assert welcomed(stream).names == ("old", "young")
            kinds = []
            for raw in stream.call:
                kinds.append(frames.opened(raw, len(kinds) + 1, range(32), 4).kind)
                if kinds[-1] == frames.GONE:
                    break
            thread.join()
    assert frames.SYNC in kinds and not {*kinds} - {frames.BACK, frames.AWAY, frames.GONE, *frames.PASSED_ON}
    assert told == ["no straight streams: all packets go by the hub"]
