"""Replicas that do not fit together, and a replica that fails, end the others with an error that names them."""

from __future__ import annotations

import json
import re

import pytest
import torch
import torch.distributed as dist
from torch import nn

import thinwire as tw
from thinwire.testing.toy import adamw, batch, inner_step, journey, sgd, toy
from thinwire.version import PROTOCOLS, Protocols, named

OTHER = Protocols(PROTOCOLS.newest + 1, PROTOCOLS.newest + 1, "9.1.0".ljust(len(named(PROTOCOLS.release)), "1"))


class Rewriting:
    """A group that rewrites one value in this replica's introduction, like a replica of another version."""

    def __init__(self, group: tw.Group, old: bytes, new: bytes) -> None:
        assert len(old) == len(new)
        self.group, self.rank, self.size, self.old, self.new = group, group.rank, group.size, old, new

    def post(self, tag, send, recv, purpose="packet"):
        if purpose == "introduction":
            changed = {peer: bytes(m.numpy().tobytes()).replace(self.old, self.new) for peer, m in send.items()}
            send = {peer: torch.frombuffer(bytearray(m), dtype=torch.uint8) for peer, m in changed.items()}
        return self.group.post(tag, send, recv, purpose)

    def close(self) -> None:
        self.group.close()


def disagree(attach_one, replicas=3):
    """Returns the error of each replica. Nothing was trained: the optimizer has no hook, and the weights are unchanged."""

    def replica(group):
        model, optimizer, strategy, wrapped = attach_one(group)
        before = [p.detach().clone() for p in model.parameters()]
        with pytest.raises(tw.DisagreementError) as caught:
            tw.Replica(strategy, model, optimizer, wrapped)
        assert all(torch.equal(a, b) for a, b in zip(before, model.parameters()))
        assert not optimizer._optimizer_step_post_hooks and not optimizer._optimizer_step_pre_hooks
        return str(caught.value)

    told = tw.run_threads(replicas, replica)
    for message in told:
        assert "Nothing was trained" in message
    return told


def test_replicas_with_different_strategies_are_refused():
    def one(group):
        model = toy()
        return model, sgd(model), tw.local_sgd(every=30 if group.rank != 2 else 31), group

    told = disagree(one)
    assert len(set(told)) == 1
    assert re.fullmatch(
        r"replica 2 does not fit replica 0: strategy: Strategy\(schedule=Every\(every=31.*\) there, "
        r"Strategy\(schedule=Every\(every=30.*\) on replica 0\. Nothing was trained\. Give every replica the same code, model and settings\.",
        told[0],
    )


def test_replicas_with_different_models_are_refused():
    class Wider(type(toy())):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(5, 2)

    def one(group):
        model = Wider() if group.rank == 1 else toy()
        return model, sgd(model), tw.local_sgd(), group

    told = disagree(one)
    assert len(set(told)) == 1
    assert told[0].startswith(
        "replica 1 does not fit replica 0: model, model / head.weight: (2, 5) torch.float32, 10 held there, (1, 5)"
    )


def test_replicas_with_different_precisions_or_frozen_layers_are_refused():
    def half(group):
        model = toy().bfloat16() if group.rank == 1 else toy()
        return model, sgd(model), tw.local_sgd(), group

    def frozen(group):
        model = toy()
        model.head.bias.requires_grad_(group.rank != 1)
        return model, sgd(model), tw.local_sgd(), group

    assert "torch.bfloat16" in disagree(half, 2)[0]
    assert "head.bias: absent there" in disagree(frozen, 2)[0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.int8, torch.bool], ids=str)
@pytest.mark.parametrize(
    "strategy", [tw.local_sgd(), tw.data_parallel(), tw.lab.recipes.d_psgd(every=2)], ids=["", "g", "n"]
)
def test_replicas_with_different_values_of_frozen_parameters_are_refused_by_name(dtype, strategy):
    """They never travel, so replicas would train different models."""

    def one(group):
        model = toy()
        model.base = nn.Parameter(torch.full((2, 1), group.rank == 1, dtype=dtype), requires_grad=False)
        return model, sgd(model), strategy, group

    told = disagree(one)
    assert len(set(told)) == 1
    assert told[0].startswith(f"replica 1 does not fit replica 0: frozen parameter base: (2, 1) {dtype}, digest ")


class Quantised(torch.Tensor):
    """A tensor of two tensors, as torchao's are."""

    @staticmethod
    def __new__(cls, codes, scales):
        return torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=torch.float32)

    def __init__(self, codes, scales):
        self.codes, self.scales = codes, scales

    def __tensor_flatten__(self):
        return ["codes", "scales"], None

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        assert function is torch.ops.aten.detach.default, "its values are not to be read"
        return cls(args[0].codes, args[0].scales)


@pytest.mark.parametrize(
    "frozen",
    [
        lambda rank: torch.full((2,), float(rank)),
        lambda rank: torch.full((2,), 1.0 + rank).to_sparse(),
        lambda rank: Quantised(torch.ones(2, dtype=torch.int8), torch.tensor(1.0 + rank)),
    ],
    ids=["dense", "sparse", "quantised"],
)
def test_a_method_with_its_own_loop_compares_frozen_parameters(frozen):
    def replica(group):
        model, method = nn.Linear(2, 1), tw.lab.methods.scaffold(every=2)
        model.base = nn.Parameter(frozen(group.rank), requires_grad=False)
        with pytest.raises(tw.DisagreementError, match="replica 1 does not fit replica 0: frozen parameter base: "):
            method.attach(model, method.optimizer(model, lr=0.1), group)

    tw.run_threads(2, replica)


@pytest.mark.leaves(
    files=("pipe:", "socket:", "anon_inode:"), why="torch keeps the gloo device of a process's first mesh"
)
def test_a_sharded_replica_compares_its_part_of_frozen_parameters():
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    mesh = init_device_mesh("cpu", (1,))
    bases = [DTensor.from_local(torch.full((2,), float(rank)), mesh) for rank in range(2)]

    def replica(group):
        model = nn.Linear(2, 1)
        model.base = nn.Parameter(bases[group.rank], requires_grad=False)
        with pytest.raises(tw.DisagreementError, match="replica 1 does not fit replica 0: frozen parameter base: "):
            tw.Replica(tw.local_sgd(), model, torch.optim.SGD([model.weight, model.bias]), group)

    try:
        tw.run_threads(2, replica)
    finally:
        dist.destroy_process_group()


def test_replicas_with_different_tensor_orders_are_refused():
    """The same tensors in another order would be averaged with the wrong partners, though every packet is valid."""

    class Swapped(type(toy())):
        def __init__(self) -> None:
            super().__init__()
            self.gain = self._parameters.pop("gain")

    def one(group):
        model = Swapped() if group.rank == 1 else toy()
        return model, sgd(model), tw.local_sgd(), group

    assert "order of tensors" in disagree(one, 2)[0]


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (
            str(PROTOCOLS).encode(),
            str(OTHER).encode(),
            f"it speaks protocols {OTHER}, they {PROTOCOLS}",
        ),
        (b"{", b"[", "sent settings that cannot be read"),
    ],
)
def test_replicas_with_different_versions_are_refused(old, new, message):
    """Every replica that hears it reports it. The one that differs hears only agreement, because its words are rewritten on the way out."""

    def replica(group):
        model = toy()
        optimizer = sgd(model)
        wrapped = Rewriting(group, old, new) if group.rank == 1 else group
        try:
            tw.Replica(tw.local_sgd(), model, optimizer, wrapped)
        except tw.PeerError as error:
            return str(error)

    told = tw.run_threads(3, replica)
    for rank in (0, 2):
        assert "replica 1" in told[rank] and message in told[rank] and "Nothing was trained" in told[rank]


@pytest.mark.parametrize("text", [b"null", b"3", b"[1]", b'"x"', b"{", b"\xff\xfe", b"[" * 20_000, b'{"a":1}', b""])
def test_unreadable_introductions_are_refused_by_name(text):
    """Any bytes cause a `DisagreementError` that names the replica."""
    from thinwire.comm import gather
    from thinwire.drivers.handshake import compare_settings

    def replica(group):
        if group.rank == 1:
            gather(group, text, 1 << 20, "introduction")
            return ""
        with pytest.raises(tw.DisagreementError, match="replica 1") as caught:
            compare_settings(group, {"a": 2})
        return str(caught.value)

    assert tw.run_threads(2, replica)[0]
    assert json.dumps({"a": 2})


def test_a_failing_replica_ends_the_others_by_name():
    """The others end with a `LinkError` that names it, at their next landing; the first error is the one reported."""

    def fail(replica, step):
        if step == 5 and replica.group.rank == 1:
            raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError, match="out of memory"):
        journey(tw.diloco(every=3), 2, before_step=fail)
    told = []

    def replica(group):
        model = toy()
        optimizer = adamw(model)
        try:
            with tw.Replica(tw.diloco(every=3), model, optimizer, group):
                for step in range(1, 20 if group.rank == 0 else 5):
                    inner_step(model, optimizer, *batch(0, group.rank, step))
                if group.rank == 1:
                    raise KeyboardInterrupt
        except tw.LinkError as error:
            told.append(str(error))
        except KeyboardInterrupt:
            pass

    tw.run_threads(2, replica)
    assert told and told[0].startswith("replica 1 closed its Replica after 4 inner steps")
