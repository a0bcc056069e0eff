"""A hub that averages, over the secure carrier: same bits as in one process, a restart of the hub, and its reserved name."""

from __future__ import annotations

import queue
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from group_laws import TIMEOUT

import thinwire as tw
from thinwire.errors import LinkError
from thinwire.exchange import SendContext
from thinwire.lab.star import reducing
from thinwire.lab.star.exchange import Star
from thinwire.lab.star.reducing import average, joined
from thinwire.lab.star.with_hub import WithHub
from thinwire.net import Hub, Token, admit, join
from thinwire.net.frames import with_reducer
from thinwire.net.invitations import opened_state
from thinwire.pieces.feedback import Feedback
from thinwire.testing.exchanges import Went, deltas
from thinwire.testing.toy import same_bits

ROUNDS, NUMEL = 4, 200_000


def reduce_rounds(group, star, x, between=lambda number: None):
    context, codec = SendContext(group), tw.codecs.E3M0()
    seen, state = [], star.init(codec, NUMEL, group.rank, group.size)
    for number in range(ROUNDS):
        between(number)
        went = Went(context, star, codec, x[number, group.rank], state, number)
        seen, state = [*seen, went.estimate], went.state
    context.close(wait=True)
    return seen


def test_a_reducer_dials_its_hub_on_the_same_machine(tmp_path, monkeypatch):
    """The address by which members reach the hub may not lead there."""
    monkeypatch.setattr(reducing, "join", lambda *given, **more: (Token.read(given[0]).host, *given[2:], more))
    folder = tmp_path / "hub"
    Hub(folder, reached_at="hub.example").close()
    for listens, host in (("127.0.0.1",) * 2, ("0.0.0.0", "127.0.0.1"), ("::", "::1"), ("10.0.0.7",) * 2):
        with opened_state(folder) as state:
            state.keep("listen", listens)
        due = host, 3, folder / reducing.KEYS, with_reducer("word"), threading.TIMEOUT_MAX, {"place": 1}
        assert joined(folder, 2, "word") == due


def test_the_end_of_the_process_that_averages_is_told_unless_it_was_asked_to_end(tmp_path, monkeypatch):
    program, told = tmp_path / "program", queue.Queue()
    monkeypatch.setattr(reducing.sys, "executable", str(program))
    program.write_text("#!/bin/sh\nread line\nexit 4\n")
    program.chmod(0o700)
    with reducing.reducing(tmp_path, 2, "", told.put):
        pass
    assert told.empty()
    program.write_text("#!/bin/sh\nexit 3\n")
    with reducing.reducing(tmp_path, 2, "", told.put):
        assert told.get() == 3


def test_an_averaging_hub_restarts_without_a_lost_round(tmp_path, capsys):
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
            return reduce_rounds(WithHub(group), Star("hub", Feedback()), x, between)

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
    assert results["reducer"].startswith(f"{ROUNDS} rounds; ") and results["reducer"].endswith(") closed its group")
    assert capsys.readouterr().out.endswith("averages for bergen, oslo\n")
    plain = tw.run_threads(2, lambda group: reduce_rounds(group, Star(0, Feedback()), x), timeout=TIMEOUT)
    for one, other in zip((results["bergen"], results["oslo"]), plain):
        assert all(same_bits(a, b) for a, b in zip(one, other))


def test_a_revoked_replica_is_named_to_the_others_and_not_the_reducer_that_leaves_after_it(tmp_path):
    told = left_alone(tmp_path, revoke, lambda: average(joined(tmp_path / "hub", 2, "")))
    assert told.startswith("replica 0 (bergen) was revoked at the hub. Another replica takes its place")


def test_a_reducer_that_is_gone_is_named_with_its_log(tmp_path):
    told = left_alone(tmp_path, lambda hub: None, lambda: joined(tmp_path / "hub", 2, "").close())
    assert told.startswith(
        "the hub's reducer closed its group. Its log is reducer.txt in the hub's folder; start the hub again "
    )


def revoke(folder):
    with opened_state(folder) as state:
        state.revoke("bergen")


def left_alone(folder, leave, reduce):
    """The error that oslo sees when its one round of two replicas does not end; bergen takes no part in it."""
    with Hub(folder / "hub") as hub, ThreadPoolExecutor(2) as pool:
        token = str(hub.invite(2))
        there = [pool.submit(join, token, "bergen", 3, folder / "keys", with_reducer(""), TIMEOUT), pool.submit(reduce)]
        with join(token, "oslo", 3, folder / "keys", with_reducer(""), TIMEOUT) as group, there[0].result():
            leave(folder / "hub")
            with pytest.raises(LinkError) as told:
                reduce_rounds(WithHub(group), Star("hub"), deltas(2, NUMEL, ROUNDS))
        there[1].result()
    return str(told.value)
