"""A hub that averages, over the secure carrier: same bits as in one process, a restart of the hub, and its reserved name."""

from __future__ import annotations

import threading

import pytest
from group_laws import TIMEOUT

import thinwire as tw
from thinwire.comm.secure import Hub, admit, join
from thinwire.comm.secure.frames import with_reducer
from thinwire.comm.with_hub import WithHub
from thinwire.errors import LinkError
from thinwire.exchange import SendContext, Star
from thinwire.lm.reducing import average, joined
from thinwire.pieces.feedback import Feedback
from thinwire.testing.exchanges import Went, deltas
from thinwire.testing.toy import same_bits

ROUNDS, NUMEL = 4, 200_000


def play(group, star, x, between=lambda number: None):
    context, codec = SendContext(group), tw.codecs.E3M0()
    seen, state = [], star.init(codec, NUMEL, group.rank, group.size)
    for number in range(ROUNDS):
        between(number)
        went = Went(context, star, codec, x[number, group.rank], state, number)
        seen, state = [*seen, went.estimate], went.state
    context.close(wait=True)
    return seen


def test_an_averaging_hub_restarts_without_a_lost_round(tmp_path):
    """What the reducer holds back survives the hub, and the replicas lose no round."""
    x = deltas(2, NUMEL, ROUNDS)
    hubs, half, again = [Hub(tmp_path / "hub")], threading.Barrier(2), threading.Barrier(2)
    token = str(hubs[0].invite(2))
    with pytest.raises(LinkError, match="the invitation is for another name"):
        admit(token, "reducer", tmp_path / "thief")
    results: dict[str, object] = {}

    def between(number):
        if number == 2:
            if half.wait(TIMEOUT) == 0:
                hubs[0].close()
                hubs.append(Hub(tmp_path / "hub"))
            again.wait(TIMEOUT)

    def replica(name):
        with join(token, name, 3, tmp_path / "keys", with_reducer(""), TIMEOUT) as group:
            assert group.names == ("bergen", "oslo", "reducer")
            return play(WithHub(group), Star("hub", Feedback()), x, between)

    def run(name, work, *of):
        try:
            results[name] = work(*of)
        except BaseException as error:
            results[name] = error
            half.abort()
            again.abort()

    works = [(name, replica, name) for name in ("oslo", "bergen")]
    works.append(("reducer", lambda: average(joined(tmp_path / "hub", 2, ""))))
    threads = [threading.Thread(target=run, args=work) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    hubs[-1].close()
    for result in results.values():
        if isinstance(result, BaseException):
            raise result
    assert results["reducer"].startswith(f"{ROUNDS} rounds; ")
    plain = tw.run_threads(2, lambda group: play(group, Star(0, Feedback()), x), timeout=TIMEOUT)
    for one, other in zip((results["bergen"], results["oslo"]), plain):
        assert all(same_bits(a, b) for a, b in zip(one, other))
