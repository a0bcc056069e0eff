"""What replicas compare before they start or resume."""

from __future__ import annotations

import re
from itertools import pairwise

import pytest
import torch

import thinwire as tw
from thinwire.drivers import handshake
from thinwire.drivers.handshake import (
    agree_on_resume,
    agree_on_weights,
    check_start,
    compare_settings,
    digest,
    introduce,
    introduction,
)
from thinwire.membership.view import difference
from thinwire.testing.toy import toy
from thinwire.version import PROTOCOLS, Protocols, __version__


def test_all_replicas_begin_with_the_weights_of_replica_0():
    def replica(group: tw.ThreadGroup) -> tuple[bytes, bytes]:
        own = [torch.tensor([1.0, 2.0]), torch.tensor([3.0 + group.rank])]
        alike, differed = agree_on_weights(group, own, "start")
        assert differed and [one.tolist() for one in own] == [[1.0, 2.0], [3.0]]
        assert agree_on_weights(group, own, "start") == (alike, False)
        return alike, digest(own)

    first, second = tw.run_threads(2, replica)
    assert first == second and first[0] == first[1] and len(first[0]) == 16
    (alone,) = tw.ThreadGroup.create(1)
    assert agree_on_weights(alone, [torch.tensor([1.0, 2.0]), torch.tensor([3.0])], "start") == (first[0], False)
    alone.close()


def test_resumed_replicas_need_equal_steps_and_states():
    def replica(group: tw.ThreadGroup) -> None:
        agree_on_resume(group, 5, bytes(16))
        with pytest.raises(tw.DisagreementError, match="replica 1 resumes at step 6, replica 0 at step 5; choose one"):
            agree_on_resume(group, 5 + group.rank, bytes(16))
        with pytest.raises(tw.DisagreementError, match="replica 1 resumes at step 5, with other anchors"):
            agree_on_resume(group, 5, bytes([group.rank] * 16))

    tw.run_threads(2, replica)


@pytest.mark.parametrize(("last", "served"), [(Protocols(3, 5, "0.4.0"), True), (Protocols(4, 5, "0.5.0"), False)])
def test_releases_that_speak_one_protocol_train_together(last: Protocols, served: bool) -> None:
    """Three replicas have different releases. It is not enough that each fits the one before it; all must share a protocol."""
    ranges = [Protocols(2, 3, "0.2.0"), Protocols(2, 4, "0.3.0"), last]

    def replica(group: tw.ThreadGroup) -> str:
        try:
            compare_settings(group, {"protocols": str(ranges[group.rank])})
        except tw.DisagreementError as error:
            return str(error)
        return ""

    for told in tw.run_threads(3, replica):
        assert bool(told) != served
        if not served:
            assert "replica 2 does not fit the replicas before it: it speaks protocols 4 to 5 (Thinwire 0.5.0)" in told
            assert "they 2 to 3 (Thinwire 0.2.0), 2 to 4 (Thinwire 0.3.0). Nothing was trained. Install one rel" in told


@pytest.mark.parametrize("release", ["0.1.0", __version__])
def test_a_fact_that_one_version_alone_states_is_refused_with_both_versions(release: str) -> None:
    """Another tree of the same protocols, whose number was forgotten: what it does not state must not look like the user's fault."""
    other = f"{PROTOCOLS.oldest} to {PROTOCOLS.newest} (Thinwire {release})"

    def replica(group: tw.ThreadGroup) -> str:
        facts = {"model": "nano"} if group.rank == 0 else {"protocols": other}
        with pytest.raises(tw.DisagreementError) as caught:
            compare_settings(group, facts)
        return str(caught.value)

    for told in tw.run_threads(2, replica):
        assert f"model: absent there, nano on replica 0; the versions differ too: protocols {other} there" in told
        assert f"{PROTOCOLS} on replica 0. Install one version on all" in told
    there, here = {"protocols": other}, {"protocols": str(PROTOCOLS), "model": "nano"}
    assert f"the versions differ too: protocols {other} there, {PROTOCOLS} at 'a'" in difference(there, here, "at 'a'")
    far = str(Protocols(PROTOCOLS.newest + 1, PROTOCOLS.newest + 1, "0.9.0"))
    assert difference({"protocols": far}, here).startswith(f"protocols: {far} there, {PROTOCOLS} here")


def test_more_fragments_than_a_packet_can_name_are_refused(monkeypatch):
    monkeypatch.setattr(handshake, "FIELD_VALUES", 2)
    fragments = tw.pieces.partition.BySize(3).fragments(toy())
    (alone,) = tw.ThreadGroup.create(1)
    introduce(alone, tw.diloco(), fragments[:2])
    with pytest.raises(tw.ConfigurationError, match="1 replicas and 3 fragments: at most 2"):
        introduce(alone, tw.diloco(), fragments)
    alone.close()


def test_an_elastic_replica_states_its_strategy_and_a_digest_of_its_model():
    def stated(*sizes: int) -> str:
        model = torch.nn.Sequential(*(torch.nn.Linear(*pair, bias=False) for pair in pairwise(sizes)))
        facts = introduction(tw.diloco(), tw.pieces.partition.Whole().fragments(model))
        assert facts == {"strategy": repr(tw.diloco()), "model": facts["model"]}
        return facts["model"]

    assert re.fullmatch("2 tensors, 1,600 parameters, digest [0-9a-f]{16}", stated(20, 40, 20))
    assert len({stated(20, 40, 20), stated(40, 20, 40), stated(20, 40, 20)}) == 2


def test_nonfinite_first_weights_are_refused():
    fragments = tw.pieces.partition.BySize(2).fragments(toy())
    check_start(fragments, [torch.zeros(2), torch.ones(2)])
    with pytest.raises(tw.ModelError, match=f"fragment '{fragments[1].name}' of replica 0 holds NaN"):
        check_start(fragments, [torch.zeros(2), torch.tensor([0.0, torch.inf])])
