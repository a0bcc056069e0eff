"""A model or an optimizer that a strategy cannot train fails when it is attached; the message says what to do."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import thinwire as tw
from thinwire.testing.toy import sgd, toy


def attach(strategy=None, model=None, optimizer=sgd, replicas=1):
    def replica(group):
        own = toy() if model is None else model()
        tw.Replica(strategy or tw.local_sgd(), own, optimizer(own), group).close()

    tw.run_threads(replicas, replica)


FEWER = "(what is outside the layers is a fragment of its own); choose fewer, or BySize."


@pytest.mark.parametrize(
    ("partition", "message"),
    [
        (tw.pieces.partition.Strided(4), f"fragments=4 for a model of 3 layers: between 1 and 3 is needed {FEWER}"),
        (
            tw.pieces.partition.Sequential(0),
            f"fragments=0 for a model of 3 layers: between 1 and 3 is needed {FEWER.replace('fewer', 'more')}",
        ),
        (tw.pieces.partition.BySize(12), "fragments=12: between 1 and 11 (the model's tensors) is needed."),
        (
            tw.pieces.partition.Strided(layers="blocks"),
            "layers='blocks' is not a list of modules of this model; it has: layers.",
        ),
    ],
)
def test_more_fragments_than_layers_are_refused(partition, message):
    with pytest.raises(tw.ConfigurationError) as caught:
        attach(tw.Strategy(partition=partition))
    assert str(caught.value) == message


def test_offsets_for_another_number_of_fragments_are_refused():
    """The error comes before training, not at the first departure."""
    message = "offsets=(3, 6) are for 2 fragments, the partition makes 4; give one offset a fragment."
    with pytest.raises(tw.ConfigurationError) as caught:
        attach(
            tw.Strategy(schedule=tw.pieces.schedule.Staggered(6, 0, (3, 6)), partition=tw.pieces.partition.Strided(3))
        )
    assert str(caught.value) == message


class Integers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.zeros(2, dtype=torch.complex64))


class WithNaN(nn.Linear):
    def __init__(self) -> None:
        super().__init__(2, 2)
        nn.init.constant_(self.bias, float("nan"))


def of_another_model(_):
    return torch.optim.SGD(toy().parameters(), lr=0.1)


def of_some(model):
    return torch.optim.SGD(list(model.parameters())[:9], lr=0.1)


def of_nothing(_):
    return torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1)


@pytest.mark.parametrize(
    ("model", "optimizer", "message"),
    [
        (nn.ReLU, of_nothing, "ReLU has no trainable parameters; at least one with requires_grad=True is needed."),
        (
            lambda: nn.Linear(2, 2).requires_grad_(False), of_nothing,
            "Linear has no trainable parameters; at least one with requires_grad=True is needed.",
        ),
        (
            lambda: nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2, affine=False, device="meta")), sgd,
            "1.running_mean is on the meta device, which holds no values; call model.to_empty(device=...) and give it its weights, then make "
            "the optimizer and the Replica.",
        ),
        (
            lambda: nn.Sequential(nn.LazyLinear(2)), lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
            "0.weight has no shape yet, because its module is lazy; call the model once with a batch, then make the optimizer and the Replica.",
        ),
        (Integers, sgd, "table is torch.complex64; only real floating-point parameters can be exchanged, freeze it."),
        (
            toy, of_another_model,
            "the optimizer does not hold 11 of the model's trainable parameters (gain, nothing, embed.weight, …); make it from this "
            "model's parameters, or freeze them (requires_grad_(False)).",
        ),
        (
            toy, of_some,
            "the optimizer does not hold 3 of the model's trainable parameters (layers.2.bias, head.weight, head.bias); make it from this "
            "model's parameters, or freeze them (requires_grad_(False)).",
        ),
        (
            toy, lambda model: torch.optim.SGD(list(model.parameters())[:-4], lr=0.1),
            "the optimizer does not hold 4 of the model's trainable parameters (layers.2.weight, layers.2.bias, head.weight, …); make it "
            "from this model's parameters, or freeze them (requires_grad_(False)).",
        ),
        (
            WithNaN, sgd,
            "fragment 'model' of replica 0 holds NaN or infinity; the weights that all start from must be finite. "
            "Initialise them, or load a sound checkpoint, before attaching the Replica.",
        ),
    ],
)  # fmt: skip
def test_unsupported_models_are_refused(model, optimizer, message):
    with pytest.raises(tw.ModelError) as caught:
        attach(model=model, optimizer=optimizer)
    assert str(caught.value) == message
