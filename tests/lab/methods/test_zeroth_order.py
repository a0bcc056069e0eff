"""Just One Byte: the code of one byte, random directions, the loss at shifted weights, and iterations."""

from __future__ import annotations

import math
import weakref
from itertools import pairwise

import pytest
import torch
from loops import LOOPS, ToyRun, attach, one_step, train_toys
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import thinwire as tw
from thinwire.app.trainer.model import Architecture, Transformer
from thinwire.lab.methods import JustOneByte
from thinwire.lab.methods.perturbed import Shifted
from thinwire.lab.methods.zeroth_order import INVALID, ZERO, Entry, apply, decode, direction, encode, magnitudes
from thinwire.rng import normals
from thinwire.testing.toy import batch, same_bits, toy, weights

METHOD = LOOPS["just_one_byte"]
ALL = [code for code in range(256) if code not in (ZERO, INVALID)]

# ---- one byte


def test_decoding_and_encoding_keep_every_byte():
    assert [encode(decode(code)) for code in ALL] == ALL
    assert decode(ZERO) == 0.0 and decode(INVALID) is None and len({decode(code) for code in ALL}) == 254


def test_the_code_is_monotone_and_odd():
    values = [decode(code) for code in (*range(255, 128, -1), *range(0, 128))]
    assert all(low < high for low, high in pairwise(values))
    for x in torch.logspace(-6, 6, 997).tolist():
        assert encode(-x) == (encode(x) ^ 128 if encode(x) else ZERO)
        assert encode(x) <= encode(x * 1.01)


def test_the_relative_error_is_at_most_the_documented_one():
    low, high = magnitudes()[0], magnitudes()[-1]
    assert (round(low, 6), round(high)) == (0.00038, 2631)
    for x in torch.logspace(math.log10(low), math.log10(high), 5001).clamp(low, high).tolist():
        assert abs(decode(encode(x)) - x) <= 0.0646 * x


@pytest.mark.parametrize(
    ("value", "code"), [(0.0, ZERO), (-0.0, ZERO), (1e-9, ZERO), (math.nan, INVALID), (-math.inf, INVALID)]
)
def test_zeros_and_infinite_values_have_codes_of_their_own(value, code):
    assert encode(value) == code


def test_values_above_the_range_are_clamped():
    assert decode(encode(1e30)) == -decode(encode(-1e30)) == magnitudes()[-1]


# ---- directions


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_normals_and_updates_have_the_same_bits_on_a_gpu():
    entry = Entry(0.01, ("a", "b"), bytes([70, 200, 30, 128]))
    here, there = torch.linspace(-1, 1, 300_001), torch.linspace(-1, 1, 300_001).cuda()
    assert same_bits(normals(3, 5, 9999), normals(3, 5, 9999, "cuda").cpu())
    apply([here], entry, 0, 0)
    apply([there], entry, 0, 0)
    assert same_bits(here, there.cpu())


def test_directions_are_different_and_uncorrelated():
    streams = {direction(0, t, name, j) for t in range(5) for name in ("0", "1", "01") for j in range(12)}
    assert len(streams) == 5 * 3 * 12
    z = torch.stack([normals(s, 0, 4096) for s in sorted(streams)[:40]])
    apart = (z @ z.T / 4096).fill_diagonal_(0)
    assert apart.abs().max() < 5 / math.sqrt(4096)


def test_the_mean_of_value_times_direction_approaches_the_gradient():
    """4000 directions: the error of each coordinate is about |g|/√4000."""
    gradient = torch.linspace(-1, 2, 10)
    total = torch.zeros(10)
    for j in range(4000):
        z = normals(direction(0, 0, "0", j), 0, 10)
        total += decode(encode(float(gradient @ z))) * z
    assert (total / 4000 - gradient).norm() < 6 * gradient.norm() * math.sqrt(10 / 4000)
    assert torch.nn.functional.cosine_similarity(total, gradient, dim=0) > 0.99


# ---- the loss at shifted weights


class ReadsWeightsOutside(nn.Module):
    """A model that reads a child's weight outside the child's forward, and a tied weight."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.out = nn.Embedding(7, 4), nn.Linear(4, 4, bias=False)
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.table.weight
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, index: Tensor) -> Tensor:
        self.seen += 1
        return self.head(self.out(self.table(index)) @ self.out.weight)


LEARNED = Architecture(layers=1, width=8, heads=2, vocabulary=11, context=6, positions="learned", tied=True)
MODELS = {
    "toy": (toy, lambda m: m(batch(0, 0, 0)[0]).square().mean()),
    "read outside": (ReadsWeightsOutside, lambda m: m(torch.arange(7)).square().mean()),
    "transformer": (lambda: Transformer(LEARNED, 3), lambda m: m(torch.arange(6)[None], torch.arange(6)[None]).loss),
    "half precision": (lambda: toy().to(torch.bfloat16), lambda m: m(batch(0, 0, 0)[0].bfloat16()).square().mean()),
}


@pytest.mark.parametrize("name", MODELS)
def test_the_loss_is_that_of_a_model_with_shifted_weights(name):
    make, loss = MODELS[name]
    torch.manual_seed(0)
    model = make().eval()
    twin = make().eval()
    twin.load_state_dict(model.state_dict())
    own = [p for p in model.parameters() if p.requires_grad]
    before = [p.detach().clone() for p in own]
    shifted = Shifted(model, own)
    for stream, scale in ((5, 1e-2), (6, -0.3)):
        begin = 0
        with torch.no_grad():
            for p, x in zip([p for p in twin.parameters() if p.requires_grad], before):
                p.copy_(x + normals(stream, begin, x.numel()).view(x.shape) * scale)
                begin += x.numel()
            assert shifted.loss(lambda j: loss(model), 0, stream, scale) == float(loss(twin))
        assert all(
            same_bits(p.detach().view(-1).view(torch.uint8), x.view(-1).view(torch.uint8)) for p, x in zip(own, before)
        )


def test_a_failed_loss_leaves_the_weights_unchanged():
    model = toy()
    shifted = Shifted(model, [p for p in model.parameters() if p.requires_grad])

    def fails(j: int) -> Tensor:
        model(batch(0, 0, 0)[0])
        if j:
            raise KeyboardInterrupt
        return torch.zeros(())

    shifted.loss(fails, 0, 1, 0.1)
    with pytest.raises(KeyboardInterrupt):
        shifted.loss(fails, 1, 1, 0.1)
    assert same_bits(weights(model), weights(toy()))


def test_a_trial_forward_does_not_update_buffers():
    model = ReadsWeightsOutside()
    shifted = Shifted(model, list(model.parameters()))
    shifted.loss(lambda j: model(torch.arange(7)).mean(), 0, 1, 0.1)
    assert model.seen.item() == 1


def test_an_iteration_builds_no_autograd_graph():
    model = toy()
    graphs = []

    def loss(j: int) -> Tensor:
        value = model(batch(0, 0, 0)[0]).mean()
        graphs.append(torch.is_grad_enabled() or value.requires_grad)
        return value

    (group,) = tw.ThreadGroup.create(1)
    METHOD.attach(model, METHOD.optimizer(model, 0.01), group).iterate(loss)
    assert len(graphs) >= 2 * METHOD.samples and not any(graphs)
    assert all(p.grad is None for p in model.parameters())


class PeakOfBytes(TorchDispatchMode):
    """Measures the peak of bytes of all new tensors, without the model's. Finalizers of storages count the freed bytes."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.now = self.peak = 0
        self.known = {p.untyped_storage()._cdata for p in model.parameters()}

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else [result]:
            if isinstance(tensor, Tensor) and (key := tensor.untyped_storage()._cdata) not in self.known:
                nbytes = tensor.untyped_storage().nbytes()
                self.known.add(key)
                self.now += nbytes
                self.peak = max(self.peak, self.now)
                weakref.finalize(tensor.untyped_storage(), self.gone, key, nbytes)
        return result

    def gone(self, key: int, nbytes: int) -> None:
        self.known.discard(key)
        self.now -= nbytes


def test_an_iteration_allocates_a_few_of_the_largest_layer():
    """Sixteen layers of 1 MB: the peak stays below five of them, so far below another copy of the weights."""
    model = nn.Sequential(*[nn.Linear(512, 512, bias=False) for _ in range(16)])
    x = torch.ones(1, 512)
    layer = 512 * 512 * 4
    (group,) = tw.ThreadGroup.create(1)
    tuner = METHOD.attach(model, METHOD.optimizer(model, 0.01), group)
    with PeakOfBytes(model) as live:
        tuner.iterate(lambda j: model(x).mean())
    assert layer <= live.peak < 5 * layer < 16 * layer


# ---- an iteration


def test_bytes_reach_nearly_the_loss_of_floats_on_a_quadratic():
    """Three replicas, 30 dimensions: after 800 iterations both losses are small and within a factor of two."""
    scale = torch.linspace(0.5, 2.0, 30)
    x = {"byte": torch.ones(30), "float": torch.ones(30)}
    lr, eps = 0.012, 1e-3
    for t in range(800):
        codes, update = bytearray(), torch.zeros(30)
        for name in ("0", "1", "2"):
            z = normals(direction(0, t, name, 0), 0, 30)
            rho = {
                k: float((scale * ((v + eps * z) ** 2 - (v - eps * z) ** 2)).sum() / (4 * eps)) for k, v in x.items()
            }
            codes.append(encode(rho["byte"]))
            update += rho["float"] * z
        apply([x["byte"]], Entry(lr, ("0", "1", "2"), bytes(codes)), 0, t)
        x["float"] -= lr / math.sqrt(3) * update
    losses = {k: float((scale * v**2).sum() / 2) for k, v in x.items()}
    assert losses["float"] < 1e-2 and losses["byte"] < 2 * losses["float"] + 1e-4, losses


def test_training_reduces_the_loss():
    replicas = train_toys(METHOD, 2, steps=150)
    x, y = batch(0, 9, 9, 256)
    assert ((replicas[0].attached.model(x) - y) ** 2).mean() < 0.7 * ((toy()(x) - y) ** 2).mean()


def test_an_update_is_divided_by_the_root_of_the_number_of_valid_values():
    """Two of the four bytes are valid values."""
    x, z = torch.zeros(5), [normals(direction(0, 7, name, 0), 0, 5) for name in ("a", "b")]
    known = apply([x], Entry(0.5, ("a", "b"), bytes([encode(1.0), INVALID, encode(-1.0), INVALID])), 0, 7)
    assert known == 2 and torch.allclose(x, (z[1] - z[0]) * 0.5 / math.sqrt(2))


def test_updates_do_not_depend_on_the_split_or_layout_of_tensors():
    """Element i gets draw i of the stream in a large tensor, in two parts of it, and in a tensor that is not contiguous."""
    entry = Entry(0.1, ("a",), bytes([encode(1.0)]))
    whole, first, rest = torch.zeros(600, 1000), torch.zeros(300_000), torch.zeros(300, 1000)
    apply([whole], entry, 0, 0)
    apply([first, rest], entry, 0, 0)
    assert same_bits(whole.view(-1), torch.cat([first, rest.view(-1)]))
    crossed = torch.zeros(1000, 600).T
    apply([crossed], entry, 0, 0)
    assert same_bits(crossed.contiguous(), whole)


def test_optimizers_other_than_plain_sgd_are_refused():
    (group,) = tw.ThreadGroup.create(1)
    model = toy()
    own = [p for p in model.parameters() if p.requires_grad]
    for optimizer in (
        torch.optim.AdamW(own),
        torch.optim.SGD(own, lr=0.1, momentum=0.9),
        torch.optim.SGD(own, 0.1, weight_decay=1),
        torch.optim.SGD(own, 0.1, maximize=True),
    ):
        with pytest.raises(tw.ModelError, match=r"torch\.optim\.SGD"):
            METHOD.attach(model, optimizer, group)


@pytest.mark.parametrize(
    "settings", [{"samples": 0}, {"samples": 5000}, {"samples": True}, {"radius": 0.0}, {"radius": math.nan}]
)
def test_invalid_settings_are_refused(settings):
    with pytest.raises(tw.ConfigurationError, match="are needed"):
        JustOneByte(**settings)


def test_a_loss_of_several_numbers_is_refused():
    (group,) = tw.ThreadGroup.create(1)
    model = toy()
    with pytest.raises(tw.ModelError, match="one value is needed"):
        METHOD.attach(model, METHOD.optimizer(model, 0.01), group).iterate(lambda j: model(batch(0, 0, 0)[0]))


def test_different_learning_rates_are_detected():
    def replica(group: tw.Group) -> None:
        trained = attach(ToyRun(METHOD), group)
        trained.attached.optimizer.param_groups[0]["lr"] = 0.1 * (1 + group.rank)
        one_step(ToyRun(METHOD), trained.attached, group.rank)

    with pytest.raises(tw.PacketError, match="codec"):
        tw.run_threads(2, replica)
