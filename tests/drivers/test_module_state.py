"""Gradients and other state of a module in torch's own form: clipped, replaced, and made finite again."""

from __future__ import annotations

import math
import sys
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from thinwire.drivers.module_state import (
    clear,
    clip,
    evaluating,
    export_state,
    gradient,
    has_sparse,
    put_gradient,
    reshard,
)


def with_gradients(sparse: bool) -> list[nn.Parameter]:
    """Returns parameters with gradients of total norm 5: row 1 of a table, sparse or not, and no gradient for an unused one."""
    table, unused = nn.Parameter(torch.zeros(3, 2)), nn.Parameter(torch.zeros(2))
    dense = torch.tensor([[0.0, 0.0], [3.0, 4.0], [0.0, 0.0]])
    table.grad = dense.to_sparse(1) if sparse else dense
    return [unused, table]


@pytest.mark.parametrize("sparse", [True, False])
@pytest.mark.parametrize("alike", [True, False])
def test_dense_and_sparse_gradients_are_clipped(sparse: bool, alike: bool) -> None:
    given = with_gradients(sparse)
    assert has_sparse(given) is sparse and not has_sparse(given[:1])
    exact = 0.0 if alike or sparse else 1e-6  # torch multiplies by 5 / (5 + 1e-6)
    assert clip(given, 5.0, alike) == 5.0 and gradient(given[1])[1].tolist() == pytest.approx(
        [3.0, 4.0], rel=exact, abs=0
    )
    assert clip(given, 1.0, alike) == pytest.approx(5.0, rel=1e-6)
    assert gradient(given[1])[1].tolist() == pytest.approx([0.6, 0.8], rel=1e-6) and given[0].grad is None
    assert has_sparse(given) is sparse


def test_only_modules_that_fsdp_wraps_release_their_parameters(monkeypatch: pytest.MonkeyPatch) -> None:
    class Wrapped(nn.Module):
        released = 0

        def reshard(self) -> None:
            self.released += 1

    model = nn.Sequential(Wrapped(), nn.Linear(2, 2))
    monkeypatch.setitem(sys.modules, "torch.distributed.fsdp", SimpleNamespace(FSDPModule=Wrapped))
    reshard(model)
    assert model[0].released == 1
    monkeypatch.delitem(sys.modules, "torch.distributed.fsdp")
    reshard(model)
    assert model[0].released == 1


def test_equal_gradients_are_not_clipped_by_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's bits depend on the processor."""
    monkeypatch.delattr(torch.nn.utils, "clip_grad_norm_")
    assert clip(with_gradients(False), 1.0, alike=True) == pytest.approx(5.0)
    with pytest.raises(AttributeError):
        clip(with_gradients(False), 1.0, alike=False)


def test_a_state_dict_is_exported_as_copies() -> None:
    model = nn.Linear(2, 1)
    found = export_state(model)
    assert found.keys() == {"weight", "bias"} and found["weight"].equal(model.weight)
    assert found["weight"].data_ptr() != model.weight.data_ptr() and not found["weight"].requires_grad


def test_tiny_gradients_are_clipped_as_in_torch() -> None:
    """torch adds 1e-6 to the norm, which counts here."""
    own, torchs = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(2))
    own.grad, torchs.grad = torch.tensor([3e-6, 4e-6]), torch.tensor([3e-6, 4e-6])
    torch.nn.utils.clip_grad_norm_([torchs], 1e-6)
    assert clip([own], 1e-6, alike=True) == pytest.approx(5e-6)
    torch.testing.assert_close(own.grad, torchs.grad, rtol=1e-5, atol=0)


def test_a_mean_replaces_a_gradient_in_its_own_layout() -> None:
    mean = torch.tensor([1.0, 2.0, 0.0, 0.0, 5.0, 6.0])
    for sparse in (True, False):
        unused, table = with_gradients(sparse)
        put_gradient(table, mean.view(3, 2))
        assert table.grad is not None and table.grad.is_sparse is sparse and gradient(table).flatten().equal(mean)
        assert not sparse or table.grad.coalesce().indices().tolist() == [[0, 2]]
        put_gradient(unused, torch.ones(2))
        assert unused.grad is not None and unused.grad.tolist() == [1.0, 1.0]


@pytest.mark.parametrize("training", [True, False])
def test_each_module_is_in_its_own_mode_after_an_evaluation(training: bool) -> None:
    """A frozen normalisation stays in evaluation mode, though the model is in training mode; and the other way round."""
    model = nn.Sequential(nn.Sequential(nn.BatchNorm1d(2), nn.Dropout()), nn.Dropout()).train(training)
    model[0].train(not training)
    model[0][1].train(training)
    with pytest.raises(KeyError), evaluating(model):
        assert not any(module.training for module in model.modules())
        raise KeyError
    assert [module.training for module in model.modules()] == [training, not training, not training, training, training]


def test_nonfinite_state_becomes_zero_and_statistics_are_reset() -> None:
    model = nn.Sequential(nn.Linear(2, 4), nn.BatchNorm1d(4), nn.BatchNorm1d(4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.randn(8, 2)).sum().backward()
    optimizer.step()
    state = optimizer.state[model[0].bias]["momentum_buffer"]
    state.copy_(torch.tensor([1.5, math.inf, -math.inf, math.nan]))
    optimizer.state[model[0].bias]["steps"] = 3  # some optimizers count in a number, which is no tensor
    whole, broken = model[2].running_mean, model[1].running_mean
    broken[2] = math.nan
    before = whole.clone()
    assert before.any()
    clear(model, optimizer)
    assert state.tolist() == [1.5, 0.0, 0.0, 0.0]
    assert not broken.any() and whole.equal(before)
