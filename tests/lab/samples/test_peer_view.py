"""Views of peers merge in any order, samples depend only on the view, and the figures are those of MoDeST."""

from __future__ import annotations

import random
import subprocess
import sys

import pytest

from thinwire.errors import PacketError
from thinwire.lab.samples.peer_view import PeerEntry, PeerView


def drawn_view(dice):
    return PeerView(
        {
            peer: PeerEntry(dice.randrange(5), dice.randrange(1, 4), dice.random() < 0.5)
            for peer in range(6)
            if dice.random() < 0.7
        }
    )


def test_peer_views_merge_in_any_order_and_any_number_of_times():
    dice = random.Random(1)
    for _ in range(300):
        a, b, c = (drawn_view(dice) for _ in range(3))
        assert a.merged(b) == b.merged(a)
        assert a.merged(b).merged(c) == a.merged(b.merged(c))
        assert a.merged(a) == a == PeerView.read(a.write())
        assert a.merged(b).merged(b) == a.merged(b)
        for peer, entry in a.merged(b).entries.items():
            known = [view.entries[peer] for view in (a, b) if peer in view.entries]
            assert entry.active == max(one.active for one in known)
            assert entry.counter == max(one.counter for one in known)


def test_a_rejoined_peer_stays_when_its_old_leave_arrives_late():
    view = PeerView.of(range(3)).with_entry(1, PeerEntry(4, 3, joined=True))
    assert view.with_entry(1, PeerEntry(9, 2, joined=False)).entries[1] == PeerEntry(9, 3, joined=True)
    assert 1 not in view.with_entry(1, PeerEntry(4, 4, joined=False)).order(5, 50)


def test_silent_peers_are_no_candidates_but_the_peer_itself_is():
    view = PeerView({peer: PeerEntry(60 if peer == 2 else 10, 1, joined=True) for peer in range(4)})
    assert set(view.order(60, 50)) == {0, 1, 2, 3}
    assert set(view.order(61, 50)) == {2} and set(view.order(61, 50, own=3)) == {2, 3}
    heard = view.heard(1, 11)
    assert set(heard.order(61, 50)) == {1, 2} and heard.heard(1, 5) == heard.heard(4, 70) == heard


def test_peers_are_sampled_uniformly_and_few_unknown_peers_change_a_sample_little():
    """100 peers, samples of 10, 2000 rounds: each is drawn 200 times, with a binomial's spread (13.4), and the shares are the paper's."""
    view = PeerView.of(range(100))
    samples = [view.order(k, 5000)[:10] for k in range(2000)]
    counts = [sum(peer in sample for sample in samples) for peer in range(100)]
    assert sum(counts) == 20_000 and min(counts) > 155 and max(counts) < 245
    spread = (sum((one - 200) ** 2 for one in counts) / 100) ** 0.5
    assert 10.5 < spread < 16.5
    assert len({tuple(sorted(sample)) for sample in samples}) == 2000

    dice = random.Random(2)
    for missing, share in ((0.01, 0.98), (0.05, 0.92), (0.1, 0.87), (0.2, 0.72)):
        common = 0
        for k in range(400):
            one, other = (PeerView.of([p for p in range(100) if dice.random() >= missing]) for _ in range(2))
            common += len({*one.order(k, 5000)[:10]} & {*other.order(k, 5000)[:10]})
        assert abs(common / 4000 - share) < 0.06


def test_a_view_is_read_within_its_limits_and_first_peers_joined_once():
    """Numbers of peers below 2^16, and counters below 2^31; both are on the wire."""
    assert PeerView.of([3]).entries == {3: PeerEntry(active=0, counter=1, joined=True)}
    two = PeerView({258: PeerEntry(3, 4, joined=True), 5: PeerEntry(1 << 24, 2, joined=False)})
    assert two.write().hex(" ", 1) == (
        "02 00 00 00 05 00 00 00 00 00 00 01 02 00 00 00 00 02 01 00 00 03 00 00 00 04 00 00 00 01"
    )
    assert PeerView.nbytes(2) == 30
    assert PeerView.read(PeerView.of([]).write()) == PeerView.of([])
    last = PeerView({(1 << 16) - 1: PeerEntry(0, (1 << 31) - 1, joined=False)})
    assert PeerView.read(last.write()) == last
    for beyond in (PeerView.of([1 << 16]), PeerView({0: PeerEntry(0, 1 << 31, joined=True)})):
        with pytest.raises(PacketError):
            PeerView.read(beyond.write())


def test_another_process_draws_the_same_sample():
    code = "from thinwire.lab.samples.peer_view import PeerView; print(PeerView.of(range(30)).order(77, 500))"
    assert PeerView.of(range(5)).order(7, 50) == (1, 2, 0, 3, 4)  # another release must draw the same, too
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=600)
    assert told.stdout.strip() == str(PeerView.of(range(30)).order(77, 500))


@pytest.mark.parametrize(
    "damage",
    [
        lambda b: b[:-1],
        lambda b: b + b"\0",
        lambda b: b"\xff\xff\xff\xff" + b[4:],
        lambda b: b[:4] + b[17:30] + b[4:17] + b[30:],  # not in order
        lambda b: b[:17] + b[4:17] + b[30:],  # a peer twice
        lambda b: b[:16] + b"\2" + b[17:],  # an unknown status
        lambda b: b[:12] + bytes(4) + b[16:],  # never joined
        lambda b: b[:-13] + b"\5\0\0\0" + b[-9:],  # a peer that is not in this group
        lambda b: b"",
    ],
)
def test_a_malformed_peer_view_is_refused(damage):
    written = PeerView.of(range(4)).write()
    assert PeerView.read(written, 4) == PeerView.of(range(4))
    with pytest.raises(PacketError):
        PeerView.read(damage(written), 4)
