"""Model buffers of replicas: averaged, or local; and averages of weights that are kept in buffers."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor, nn

import thinwire as tw
from thinwire.app.jobs.ema import EMA
from thinwire.comm.group import gather
from thinwire.drivers.model_buffers import average, floating

REPLICAS = 3


class Net(nn.Module):
    def __init__(self, average: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 1))
        self.register_buffer("table", torch.tensor([0.1, 1 / 3, 1e30]))  # a mean in fp32 would round it
        self.register_buffer("passing", torch.ones(2), persistent=False)
        self.ema = EMA(self.body, 0.9) if average else None

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.body(x)
        return out


def trained(buffers: str, strategy: tw.Strategy | None = None, average: bool = False) -> list[dict[str, Tensor]]:
    """Returns what each replica holds at the end; replicas see different samples."""
    models = [Net(average) for _ in range(REPLICAS)]

    def replica(group: tw.Group) -> dict[str, Tensor]:
        model = models[group.rank]
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        samples = torch.Generator().manual_seed(group.rank)
        with tw.Replica(strategy or tw.diloco(every=2), model, optimizer, group, buffers=buffers) as attached:
            for step in range(5):
                x = (1 + group.rank) * torch.randn(8, 4, generator=samples)
                (model(x) - x.sum(1, keepdim=True)).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
                if model.ema:
                    model.ema.update(model.body)
                if step == 2:
                    before = {name: one.clone() for name, one in model.named_buffers()}
                    with attached.averaged_buffers():
                        told = model.body[1].running_mean.clone()
                    assert all(torch.equal(one, before[name]) for name, one in model.named_buffers())
                    assert torch.equal(told, before["body.1.running_mean"]) == (buffers == "local")
        return {name: value.clone() for name, value in model.state_dict().items()}

    return tw.run_threads(REPLICAS, replica, timeout=600.0)


@pytest.mark.parametrize("strategy", [tw.diloco(every=2), tw.streaming_diloco(every=3, delay=1), tw.data_parallel()])
@pytest.mark.filterwarnings("ignore:.*running statistics")
def test_buffers_are_averaged_over_replicas_and_nothing_else_changes(strategy: tw.Strategy) -> None:
    """Parameters have the same bits with either policy, and so have buffers that are equal on all replicas."""
    local, mean = trained("local", strategy), trained("mean", strategy)
    for name in local[0]:
        own = [one[name] for one in local]
        assert all(torch.equal(one[name], mean[0][name]) for one in mean)
        if name.startswith("body.1.running"):
            assert not torch.equal(own[0], own[1])
            assert torch.equal(mean[0][name], ((own[0] + own[1]) + own[2]) / 3)
        else:
            assert all(torch.equal(one, mean[0][name]) for one in own), name


@pytest.mark.filterwarnings("ignore:.*running statistics")
def test_averaged_weights_in_buffers_become_one_mean() -> None:
    """With data-parallel training these averages are already equal; with deltas they differ, and become one."""
    local, mean = trained("local", average=True), trained("mean", average=True)
    name = "ema.0|weight"
    assert not torch.equal(local[0][name], local[1][name]) and torch.equal(mean[0][name], mean[1][name])
    assert torch.allclose(mean[0][name], torch.stack([one[name] for one in local]).mean(0))
    alike = trained("local", tw.data_parallel(), average=True)
    assert torch.equal(alike[0][name], alike[1][name])


class Waves(nn.Module):
    """Random features, some of which are not saved, and a count."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.register_buffer("frequencies", torch.randn(4, 8))
        self.register_buffer("phases", torch.randn(8, dtype=torch.float64), persistent=False)
        self.register_buffer("count", torch.tensor(seed))
        self.head = nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(torch.sin(x @ self.frequencies + self.phases.float()))
        return out


@pytest.mark.parametrize("buffers", ["mean", "local"])
def test_all_start_from_the_buffers_of_replica_0(buffers: str) -> None:
    """Otherwise replicas that began with other seeds would average the weights of unlike functions."""
    models = [Waves(seed) for seed in range(REPLICAS)]
    before = [{name: one.clone() for name, one in model.named_buffers()} for model in models]
    said: list[list[str]] = [[] for _ in models]

    def replica(group: tw.Group) -> None:
        model = models[group.rank]

        def observe(event: str, step: int, **fields: object) -> None:
            if event == "warning":
                said[group.rank].append(str(fields["message"]))

        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        tw.Replica(tw.diloco(every=2), model, optimizer, group, buffers=buffers, observer=observe).close()

    tw.run_threads(REPLICAS, replica, timeout=600.0)
    for rank, model in enumerate(models):
        expected = before[0 if buffers == "mean" else rank]
        assert all(torch.equal(one, expected[name]) for name, one in model.named_buffers())
        assert any("different buffers; all start from replica 0's" in one for one in said[rank]) == (buffers == "mean")


class Graph(nn.Module):
    """Averages over the neighbours in a sparse graph, whose values are drawn."""

    def __init__(self, seed: int, layout: torch.layout) -> None:
        super().__init__()
        edges = torch.zeros(4, 4)
        edges[[0, 1, 2, 3], [1, 2, 3, 0]] = torch.rand(4, generator=torch.Generator().manual_seed(seed)) + 0.5
        blocks = {"blocksize": (2, 2)} if layout in (torch.sparse_bsr, torch.sparse_bsc) else {}
        self.register_buffer("edges", edges.to_sparse(layout=layout, **blocks))
        self.head = nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(x)
        return out


@pytest.mark.parametrize(
    "layout", [torch.sparse_coo, torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc]
)
def test_sparse_buffers_are_those_of_replica_0(layout: torch.layout) -> None:
    def replica(group: tw.Group) -> Tensor:
        model = Graph(group.rank, layout)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with tw.Replica(tw.diloco(every=2), model, optimizer, group):
            model(torch.ones(3, 4)).sum().backward()
            optimizer.step()
        return model.get_buffer("edges").to_dense()

    due = Graph(0, layout).get_buffer("edges").to_dense()
    assert all(torch.equal(one, due) for one in tw.run_threads(REPLICAS, replica, timeout=600.0))


def test_models_with_other_buffers_are_refused() -> None:
    def replica(group: tw.Group) -> None:
        model = Waves(0)
        if group.rank:
            model.register_buffer("more", torch.zeros(3))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with pytest.raises(tw.DisagreementError, match="replica 1 has other buffers than replica 0"):
            tw.Replica(tw.diloco(), model, optimizer, group)

    tw.run_threads(2, replica, timeout=600.0)


def test_a_model_may_be_moved_while_it_holds_the_anchors() -> None:
    """`model.half()` gives each parameter new storage; the replica's own training is in it afterwards."""

    def replica(group: tw.Group) -> None:
        model = Net().double().float()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        attached = tw.Replica(tw.diloco(every=4), model, optimizer, group)
        for _ in range(2):
            x = (1 + group.rank) * torch.randn(8, 4, generator=torch.Generator().manual_seed(group.rank))
            model(x).square().mean().backward()
            optimizer.step()
        own = {name: value.clone() for name, value in model.state_dict().items()}
        with attached.averaged_buffers(), attached.anchored():
            assert not torch.equal(model.body[0].weight, own["body.0.weight"])
            model.double()
            model.float()
        assert all(torch.equal(value, own[name]) for name, value in model.state_dict().items())
        attached.close()

    tw.run_threads(2, replica, timeout=600.0)


def test_buffers_of_another_size_are_refused() -> None:
    def replica(group: tw.Group) -> None:
        if group.rank:
            for sent, limit in ((16, 16), (20, 24)):
                gather(group, bytes(sent), limit, "buffers")
            return
        average([], group.size, partial(gather, group))  # has no buffers, and sends nothing
        with pytest.raises(tw.DisagreementError) as caught:
            average(floating(nn.BatchNorm1d(3)), group.size, partial(gather, group))
        assert str(caught.value) == "replica 1 sent 20 bytes of buffers, 24 are needed; its model differs."

    tw.run_threads(2, replica, timeout=600.0)


def test_an_unknown_buffer_policy_is_refused() -> None:
    (group,) = tw.ThreadGroup.create(1)
    model = Net()
    with pytest.raises(tw.ConfigurationError, match=r"buffers='median': 'mean' or 'local'"):
        tw.Replica(tw.diloco(), model, torch.optim.SGD(model.parameters(), lr=0.1), group, buffers="median")


@pytest.mark.parametrize("strategy", [tw.diloco(every=10), tw.lab.recipes.d_psgd(every=10)])
def test_averaged_buffers_do_not_wait_for_a_replica_that_has_finished(strategy: tw.Strategy) -> None:
    """Both would wait for each other until the time-out."""

    def replica(group: tw.Group) -> str:
        model = Net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        attached = tw.Replica(strategy, model, optimizer, group)
        for _ in range(1 + group.rank):
            model(torch.ones(8, 4)).square().mean().backward()
            optimizer.step()
        with pytest.raises(tw.DisagreementError) as caught:
            if group.rank:
                with attached.averaged_buffers():
                    pass
            else:
                attached.finish()
        attached.close()
        return str(caught.value)

    first, second = tw.run_threads(2, replica, timeout=60.0)
    assert "replica 1 has counted 2 inner steps, this replica has counted 1" in first
    assert "replica 0 has finished after 1 inner steps, this replica has counted 2" in second


class Taught(nn.Module):
    """Has a frozen copy that the loop moves, and a frozen base that it leaves."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.student, self.teacher = nn.Linear(4, 1), nn.Linear(4, 1).requires_grad_(False)
        self.base = nn.Linear(4, 4).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.student(self.base(x))
        return out


@pytest.mark.parametrize("buffers", ["mean", "local"])
@pytest.mark.parametrize("quantity", ["values", "data"])  # `.data` leaves no trace in version counters
def test_frozen_parameters_that_the_loop_changes_are_named_early_and_averaged(buffers: str, quantity: str) -> None:
    heard: list[list[tuple[int, str]]] = [[], []]
    models = [Taught() for _ in heard]  # not in the threads, which share a generator

    def replica(group: tw.Group) -> tuple[Taught, Tensor]:
        model = models[group.rank]
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.05)
        samples = torch.Generator().manual_seed(group.rank)

        def observe(event: str, step: int, **fields: object) -> None:
            if event == "warning":
                heard[group.rank].append((step, str(fields["message"])))

        with tw.Replica(
            tw.streaming_diloco(every=2, delay=1), model, optimizer, group, buffers=buffers, observer=observe
        ) as attached:
            for step in range(8):
                x = torch.randn(8, 4, generator=samples)
                (model(x) - x.sum(1, keepdim=True)).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
                with torch.no_grad():
                    for own, shadow in zip(model.student.parameters(), model.teacher.parameters()):
                        (shadow.data if quantity == "data" else shadow).lerp_(own, 0.1)
                if step == 6:
                    before = [p.clone() for p in model.parameters() if not p.requires_grad]
                    with attached.averaged_buffers():
                        inside = model.teacher.weight.clone()
                    assert all(
                        torch.equal(p, q)
                        for p, q in zip([*model.teacher.parameters(), *model.base.parameters()], before)
                    )
            own_teacher = model.teacher.weight.clone()
        assert torch.equal(inside, before[0]) == (buffers == "local")
        return model, own_teacher

    (first, own), (second, other) = tw.run_threads(2, replica, timeout=600.0)
    if buffers == "mean":
        assert torch.equal(first.teacher.weight, second.teacher.weight)
        assert torch.equal(first.teacher.weight, (own + other) / 2)
    else:
        assert torch.equal(first.teacher.weight, own) and torch.equal(second.teacher.weight, other)
    assert torch.equal(first.base.weight, Taught().base.weight)
    for told in heard:
        ((step, message),) = [(step, text) for step, text in told if "frozen parameters" in text]
        assert step < 8 and "2 frozen parameters (teacher.weight, ...)" in message
        assert ("become the mean" in message.split("Each replica keeps")[0]) == (buffers == "mean")


def test_a_frozen_parameter_that_one_replica_changes_beyond_the_sample_is_found_at_the_end() -> None:
    """The sample of training does not see one value of many; the comparison at the end sees all."""

    def replica(group: tw.Group) -> Tensor:
        model = nn.Sequential(nn.Linear(300, 300).requires_grad_(False), nn.Linear(300, 1))
        nn.init.ones_(model[0].weight)
        nn.init.zeros_(model[0].bias)
        optimizer = torch.optim.SGD(model[1].parameters(), lr=0.05)
        with tw.Replica(tw.diloco(every=2), model, optimizer, group, observer=lambda *_, **__: None):
            model(torch.ones(2, 300)).sum().backward()
            optimizer.step()
            if group.rank:
                model[0].weight[7, 7].data.fill_(3.0)
        return model[0].weight.detach()

    first, second = tw.run_threads(2, replica, timeout=600.0)
    assert torch.equal(first, second) and float(first[7, 7]) == 2.0 and float(first.sum()) == 300 * 300 + 1
