"""Codistillation of different models: the bytes, resumes, the weight of wrong predictions, and rounds without predictions."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from codistilled import METHOD, PROBE, VOCABULARY, ChainProbe, alone, attach, chain, model_of, train, train_until
from secure_groups import run_secure

import thinwire as tw
from thinwire import checkpoint
from thinwire.comm import CountedGroup, Ledger, run_threads
from thinwire.errors import ConfigurationError, DisagreementError
from thinwire.lab.methods import codistill
from thinwire.lab.methods.predictions import PredictionCoder
from thinwire.net import Hub
from thinwire.packet import HEADER_NBYTES
from thinwire.testing.toy import Shuffled, same_bits


def test_a_replica_trains_alone_with_weight_0_or_without_others():
    for trained, rank in [*zip(run_threads(3, lambda group: train(group, replace(METHOD, weight=0.0))), range(3))]:
        assert same_bits(trained.final, alone(rank)) and trained.heard("flight")
    assert same_bits(run_threads(1, train)[0].final, alone(0))
    assert not same_bits(run_threads(2, train)[0].final, alone(0))


def test_a_replica_trains_alone_during_the_warm_up():
    replicas = run_threads(2, lambda group: train(group, replace(METHOD, warmup=24)))
    assert [same_bits(trained.final, alone(rank)) for rank, trained in enumerate(replicas)] == [True, True]


def test_sent_bytes_are_at_most_the_predicted_ones():
    ledgers = [Ledger() for _ in range(3)]
    replicas = run_threads(3, lambda group: train(CountedGroup(group, ledgers[group.rank]), replace(METHOD, warmup=10)))
    most = PredictionCoder(4 * PROBE, VOCABULARY, 3).nbytes
    for trained, ledger in zip(replicas, ledgers):
        foreseen, sent = ([event["nbytes"] for event in trained.heard(kind)] for kind in ("depart", "flight"))
        assert foreseen == [2 * HEADER_NBYTES] + 5 * [2 * (HEADER_NBYTES + most)]  # round 1 lies within the warm-up
        assert sent[0] == foreseen[0] and all(a < b for a, b in zip(sent[1:], foreseen[1:]))
        assert ledger.sent("packet") == sum(sent)
    assert sum(ledger.sent("packet") for ledger in ledgers) == sum(ledger.received("packet") for ledger in ledgers)
    method, each = codistill(probe=10, top=4), PredictionCoder(100, 256, 4).nbytes
    assert method.nbytes_per_period(0, 3) == 2 * (HEADER_NBYTES + each)
    assert [method.nbytes_per_period(0, 2, period=period) for period in (7, 8)] == [48, 48 + each]


def test_any_arrival_order_and_an_encrypted_carrier_give_the_same_bits(tmp_path: Path):
    straight = [trained.final for trained in run_threads(3, train)]
    shuffled = run_threads(3, lambda group: train(Shuffled(group, 1)))
    hub = Hub(tmp_path / "hub")
    try:
        secure = run_secure(hub, 3, train, tmp_path)
    finally:
        hub.close()
    for others in (shuffled, secure):
        assert all(same_bits(trained.final, one) for trained, one in zip(others, straight, strict=True))


@pytest.mark.parametrize("at", [9, 11])  # with a round in flight, and with one in use
def test_a_resumed_run_has_the_bits_of_an_uninterrupted_one(at: int, tmp_path: Path):
    whole = run_threads(2, train)

    def first(group: tw.Group) -> None:
        trained = train_until(attach(METHOD, group), group.rank, at)
        assert (trained.attached._flying is not None) == (at == 9)
        checkpoint.save(tmp_path / str(group.rank), trained.attached, notes={})
        train_until(trained, group.rank, at + 3)  # these steps are lost

    def second(group: tw.Group) -> torch.Tensor:
        trained = attach(METHOD, group, seed=99)
        found, _ = checkpoint.newest_common(tmp_path / str(group.rank), group)
        checkpoint.load(found, trained.attached)
        assert trained.attached.step == at
        train_until(trained, group.rank, 24).attached.finish()
        return trained.final

    run_threads(2, first)
    assert all(same_bits(a, b.final) for a, b in zip(run_threads(2, second), whole))


def test_replicas_at_work_go_back_to_a_state_before_the_first_round():
    """They were 9 steps further: with a round in flight, and with predictions of another."""
    method = replace(METHOD, warmup=0)

    def back(group: tw.Group) -> torch.Tensor:
        trained = train_until(attach(method, group), group.rank, 1)
        saved = deepcopy((trained.model.state_dict(), trained.optimizer.state_dict()))
        state = trained.attached.state()
        train_until(trained, group.rank, 9)
        assert trained.attached._flying and trained.attached._heard
        trained.model.load_state_dict(saved[0])
        trained.optimizer.load_state_dict(saved[1])
        trained.attached.load_state(*state)
        train_until(trained, group.rank, 24).attached.finish()
        return trained.final

    whole = run_threads(2, lambda group: train(group, method))
    assert all(same_bits(a, b.final) for a, b in zip(run_threads(2, back), whole))


@torch.no_grad()
def loss_of(trained) -> float:
    tokens, targets = chain(7, 400)
    return float(torch.nn.functional.cross_entropy(trained.model(tokens), targets))


def test_a_replica_with_wrong_predictions_gets_no_weight():
    """The others train as without it. With equal weights their loss would be higher."""

    def contrary(rank: int, number: int, logits: torch.Tensor) -> torch.Tensor:
        return -8 * logits if rank == 2 else logits

    steps, method = 60, replace(METHOD, weight=2.0)
    honest = run_threads(2, lambda group: train(group, method, steps))
    weighed = run_threads(3, lambda group: train(group, method, steps, contrary))
    alike = run_threads(3, lambda group: train(group, replace(method, sharpness=0.0), steps, contrary))
    for rank in (0, 1):
        assert weighed[rank].attached.weights[2] < 1e-3 < min(weighed[rank].attached.weights[:2])
        torch.testing.assert_close(weighed[rank].final, honest[rank].final, atol=0.05, rtol=0)
        assert 1.1 * loss_of(weighed[rank]) < loss_of(alike[rank])
    assert weighed[0].attached.weights == weighed[1].attached.weights  # equal weights from the same packets


def test_infinite_and_damaged_predictions_are_left_out(monkeypatch: pytest.MonkeyPatch):
    """A replica with NaN predictions refuses them itself, the receivers find damaged bytes. The others train as without them."""

    def broken(rank: int, number: int, logits: torch.Tensor) -> torch.Tensor:
        return logits * float("nan") if rank == 1 else logits

    replicas = run_threads(2, lambda group: train(group, change=broken))
    assert same_bits(replicas[0].final, alone(0)) and not same_bits(replicas[1].final, alone(1))
    assert all([event["by"] for event in trained.heard("refused")] == [[1]] * 6 for trained in replicas)
    encode = PredictionCoder.encode

    monkeypatch.setattr(PredictionCoder, "encode", lambda coder, told: torch.full_like(encode(coder, told), 255))
    replicas = run_threads(2, train)
    assert [same_bits(trained.final, alone(rank)) for rank, trained in enumerate(replicas)] == [True, True]
    assert all("is not counted in round" in event["message"] for event in replicas[0].heard("warning"))
    assert {event["message"][:9] for event in replicas[0].heard("warning")} == {"replica 0", "replica 1"}


def test_replicas_with_different_settings_probes_or_tokens_are_refused():
    def other_method(group: tw.Group) -> None:
        attach(replace(METHOD, top=3 + group.rank), group)

    def other_text(group: tw.Group) -> None:
        model = model_of(4)
        probe = ChainProbe(model)
        if group.rank:
            probe.targets = lambda number: chain(5, PROBE)[1]  # type: ignore[method-assign]
        METHOD.attach(model, torch.optim.SGD(model.parameters(), lr=0.1), group, probe=probe)

    def other_tokens(group: tw.Group) -> None:
        model = model_of(4)
        probe = ChainProbe(model, vocabulary=VOCABULARY + group.rank)
        METHOD.attach(model, torch.optim.SGD(model.parameters(), lr=0.1), group, probe=probe)

    for start, told in (
        (other_method, "strategy: "),
        (other_text, "text of the probe"),
        (other_tokens, "vocabulary: 13"),
    ):
        with pytest.raises(DisagreementError, match=told):
            run_threads(2, start)
    with pytest.raises(ConfigurationError, match="more tokens than top"):
        run_threads(1, lambda group: attach(replace(METHOD, top=VOCABULARY), group))


def test_a_stop_request_stops_all_at_the_same_step():
    def replica(group: tw.Group) -> int:
        trained = attach(replace(METHOD, weight=0.0), group)
        if group.rank == group.size - 1:
            train_until(trained, group.rank, 5)
            trained.attached.request_stop()
        return train_until(trained, group.rank, 40).attached.step

    assert run_threads(1, replica) == [6]
    assert run_threads(2, replica) == [10, 10]  # sent with round 2 after step 8 and received two steps later
