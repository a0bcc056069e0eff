"""What a replica of unequal speed says has bounds: beyond them its message is refused, or its delta left out, and the syncer goes on."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from thinwire.codecs import Identity
from thinwire.drivers.unequal.messages import COUNTED, DELTA, LEFT_OUT, SyncerMessages, Up
from thinwire.drivers.unequal.method import Decoupled
from thinwire.drivers.unequal.syncer import Syncer, first_state
from thinwire.errors import PacketError
from thinwire.pieces.partition import Fragment

SOUND = Up(DELTA, 1, steps=5, taken=10, tokens=40.0, seconds=0.1, body=torch.zeros(16, dtype=torch.uint8))
MESSAGES = SyncerMessages(3, 0, [4], [Identity()], [Identity()])


@pytest.mark.parametrize(
    "lie",
    [{"seconds": 1e-300}, {"seconds": -1.0}, {"seconds": 1e9}, {"taken": 1 << 40}, {"taken": 4}, {"tokens": 1e15}],
)
def test_a_message_out_of_bounds_is_refused(lie: dict[str, Any]) -> None:
    assert MESSAGES.read_up(MESSAGES.write_up(SOUND), 1).seconds == 0.1
    with pytest.raises(PacketError, match="replica 1 sent"):
        MESSAGES.read_up(MESSAGES.write_up(Up(**(vars(SOUND) | lie))), 1)


@pytest.mark.parametrize("base", [1, 2])
def test_a_delta_from_a_later_version_is_left_out(base: int) -> None:
    method = Decoupled(every=5, codec=Identity(), down=Identity())
    parameter = torch.nn.Parameter(torch.zeros(4))
    state = first_state(method, Fragment("x", [("x", parameter)]), 0)
    syncer = Syncer.of(method, [state], MESSAGES)
    assert syncer.take(Up(**(vars(SOUND) | {"base": base})))
    assert syncer.take(Up(**(vars(SOUND) | {"sender": 2})))
    _, outcomes = syncer.hold(0, {0, 1, 2})
    assert outcomes == {1: LEFT_OUT, 2: COUNTED} and syncer.agreed[0].version == 1
