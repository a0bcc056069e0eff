"""What reduces gradients inside a site works, and is refused if it reaches other replicas. Optimizers that step in backward work."""

from __future__ import annotations

import pytest
import torch
from core_processes import run_world
from site_programs import STEPS, batch, model, train, within_sites
from torch import nn

import thinwire as tw
from thinwire.testing.toy import same_bits, weights


@pytest.mark.slow
def test_gradients_may_be_reduced_inside_a_site_only(tmp_path):
    """Inside a site DDP, its bare module, composable `replicate`, FSDP2, HSDP and a pipeline train as one process with the whole batch does."""
    ranks = run_world(within_sites, tmp_path)

    def replica(group):
        trained = model()

        def update(step):
            x = batch(group.rank, step)
            (trained(x) - x.flip(1)).square().mean().backward()

        return train(tw.diloco(every=3), trained, group, None, update)

    expected, _ = tw.run_threads(2, replica)
    first = ranks[0]["DDP"]
    for found in ranks:
        for name in ("DDP", "the module of DDP", "replicate", "FSDP2", "HSDP"):
            assert all(same_bits(value, first[key]) for key, value in found[name].items())
            assert found[name].keys() == expected.keys()
        for name in ("DDP", "pipeline"):
            for key, value in found[name].items():
                torch.testing.assert_close(value, expected[key], rtol=1e-5, atol=1e-6)
        for name in ("DDP of all", "replicate of all", "FSDP2 of all"):
            assert "among the ranks [0, 1, 2, 3]" in found[name] and "its site has" in found[name]
    assert {**ranks[0]["pipeline"], **ranks[1]["pipeline"]}.keys() == expected.keys()
    assert all(same_bits(value, ranks[2]["pipeline"][key]) for key, value in ranks[0]["pipeline"].items())


def test_an_optimizer_for_each_parameter_may_step_in_backward():
    """A step of all is one inner step. One replica that averages with itself equals the loop without it, bit for bit; two end equal."""

    def loop(group, attached):
        trained: nn.Module = model()
        optimizers = {p: torch.optim.AdamW([p], lr=1e-2) for p in trained.parameters()}

        def step(parameter):
            optimizers[parameter].step()
            optimizers[parameter].zero_grad()

        for parameter in optimizers:
            parameter.register_post_accumulate_grad_hook(step)

        def run():
            for number in range(STEPS):
                x = batch(group.rank, number)
                (trained(x) - x.flip(1)).square().mean().backward()

        if attached:
            with tw.Replica(tw.local_sgd(every=3), trained, list(optimizers.values()), group) as replica:
                run()
            assert replica.step == STEPS
        else:
            run()
        return weights(trained)

    (bare,), (alone,) = (tw.run_threads(1, lambda group, a=a: loop(group, a)) for a in (False, True))
    assert same_bits(bare, alone)
    assert same_bits(*tw.run_threads(2, lambda group: loop(group, True)))
