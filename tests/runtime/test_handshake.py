"""What replicas compare before they begin, or go on."""

from __future__ import annotations

import pytest
import torch

import thinwire as tw
from thinwire.runtime.handshake import agree_on_resume, agree_on_weights, digest


def test_all_begin_with_the_weights_of_replica_0():
    def replica(group: tw.ThreadGroup) -> tuple[bytes, bytes]:
        own = [torch.tensor([1.0, 2.0]), torch.tensor([3.0 + group.rank])]
        alike, differed = agree_on_weights(group, own, "start")
        assert differed and [one.tolist() for one in own] == [[1.0, 2.0], [3.0]]
        assert agree_on_weights(group, own, "start") == (alike, False)
        return alike, digest(own)

    first, second = tw.run_threads(2, replica)
    assert first == second and first[0] == first[1] and len(first[0]) == 16


def test_all_go_on_from_one_step_and_one_state():
    def replica(group: tw.ThreadGroup) -> None:
        agree_on_resume(group, 5, bytes(16))
        with pytest.raises(tw.DisagreementError, match="replica 1 resumes at step 6 with other anchors"):
            agree_on_resume(group, 5 + group.rank, bytes(16))
        with pytest.raises(tw.DisagreementError, match="replica 1 resumes at step 5 with other anchors"):
            agree_on_resume(group, 5, bytes([group.rank] * 16))

    tw.run_threads(2, replica)
