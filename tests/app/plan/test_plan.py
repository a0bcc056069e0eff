"""`thinwire plan`: the best setting for a link, its warnings, targets, refusals, and a run file that trains."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from thinwire.app.cli import main
from thinwire.app.plan import expected, explain, scaling
from thinwire.app.plan.compute import shape_of
from thinwire.app.plan.cost import DEAR
from thinwire.app.plan.links import Links
from thinwire.app.plan.machine import CodecSpeed, Machine, RoundPrice
from thinwire.app.plan.memory import replica_memory
from thinwire.app.plan.search import SEARCHED, Setting, Task, settings
from thinwire.app.plan.targets import Targets, meeting
from thinwire.app.records.units import text_of_share
from thinwire.app.trainer.model import SIZES
from thinwire.app.trainer.run import Run
from thinwire.catalogue.methods import RECIPES
from thinwire.comm import Link
from thinwire.errors import ConfigurationError

GPU = Machine("gpu", memory_nbytes=80 * 10**9, flops_per_second=1.5e14, device="cuda")
BILLION = Run.of(model="1b", tokenizer="bpe:32000", sequence=2048)


def task(link: str = "100mbit,50ms", replicas: int = 4, **changes: object) -> Task:
    made = Task(base=BILLION, links=Links.uniform(Link.parse(link), replicas), machines=(GPU,), tokens=25e9)
    return replace(made, **changes)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def found() -> list[Setting]:
    return settings(task())


@pytest.mark.parametrize(
    ("link", "wins", "replicas"),
    [
        ("10000gbit", "data_parallel", 4),
        ("1gbit,10ms", "streaming_sign", 4),
        ("100mbit,50ms", "streaming_sign", 4),
        ("10kbit,1s", "diloco", 1),
    ],
)
def test_the_best_method_depends_on_the_link(link: str, wins: str, replicas: int) -> None:
    """Data-parallel training on a fast link, streaming on a thin one, and one replica alone on a nearly useless one."""
    best = settings(task(link))[0]
    assert (best.method, best.run.placement.replicas) == (wins, replicas)


def test_bytes_of_a_star_are_the_mean_of_its_replicas_and_packets_travel_both_ways() -> None:
    """The center sends a packet to each other replica, which sends one to it, and each way takes its time on the sender's link."""
    for setting in settings(task(base=BILLION.changed(exchange="Star(0)"), methods=("diloco",))):
        others, exchange = setting.replicas - 1, setting.strategy.exchange
        packets = [exchange.nbytes_sent(codec, numel, others + 1, rank=1) for codec, numel in setting.candidate.coded]
        if others:
            sent = 2 * others * sum(packets) / (others + 1)
            assert setting.period_nbytes == pytest.approx(sent, rel=1e-3)
            seconds = [traffic.wire_seconds + traffic.way_seconds for traffic in setting.traffic]
            assert seconds == pytest.approx([(1 + others) * 8 * nbytes / 100e6 + 0.1 for nbytes in packets], rel=1e-3)


def test_every_method_is_ranked_by_useful_tokens_and_has_all_figures(found: list[Setting]) -> None:
    assert {setting.method for setting in found} == set(SEARCHED)
    useful = [setting.useful_tokens_per_second for setting in found if setting.fits]
    assert all(later <= 1.006 * earlier for earlier, later in pairwise(useful))
    for setting in found:
        assert 0 < setting.pace.utilization <= 1 and setting.memory_nbytes > 0 and setting.loss.value > 1
        assert (
            setting.run.optimizer.steps
            * setting.run.data.batch
            * setting.run.data.accumulate
            * setting.run.data.sequence
            * setting.run.placement.replicas
            >= 25e9
        )
        assert explain.sentence(setting, found[0]).endswith(".")


def test_traffic_is_a_multiple_of_the_best_ones_or_a_rate_where_that_sends_nothing(found: list[Setting]) -> None:
    alone, *others = settings(task("10kbit,1s"))
    assert alone.run.placement.replicas == 1
    for setting in others:
        if setting.run.placement.replicas > 1:
            assert "bit/s of traffic where it sends nothing" in explain.sentence(setting, alone)
    several = [setting for setting in found if setting.run.placement.replicas > 1]
    least, most = (of(several, key=lambda setting: setting.bits_per_second) for of in (min, max))
    times = most.bits_per_second / least.bits_per_second
    assert times > 100 and f" {times:.0f} × the traffic" in explain.sentence(most, least)


def test_learning_rate_and_batch_follow_the_laws_where_they_hold(found: list[Setting]) -> None:
    parameters = SIZES["1b"].parameters()
    run = next(s for s in found if s.method == "streaming_diloco" and s.run.placement.replicas == 4).run
    assert run.optimizer.lr == pytest.approx(scaling.predict("learning_rate", parameters, 4, "joint").value, rel=0.01)
    batch = 4 * run.data.batch * run.data.accumulate * 2048
    assert batch == pytest.approx(scaling.predict("batch_tokens", parameters, 4, "joint").value, rel=0.05)
    assert run.method.outer_lr == 0.6
    small = settings(task(base=Run.of(model="tiny", batch=3, accumulate=2, lr=0.005)))[0]
    assert small.run.optimizer.lr == 0.005 and small.run.data.batch * small.run.data.accumulate == 6
    assert "batch-outside-fit" in [warning.name for warning in small.warnings]


def test_a_longer_delay_of_signs_raises_the_predicted_loss_with_a_warning(found: list[Setting]) -> None:
    every = expected.FORMS[0].every  # the recipe's
    signs = [s for s in found if s.method == "streaming_sign" and s.replicas == 4 and s.run.method.every == every]
    losses = {setting.run.method.delay: setting.loss.value for setting in signs}
    assert sorted(losses) == [1, 2, 3] and losses[1] < losses[2] < losses[3]
    (diloco,) = (s for s in found if s.label == "streaming_diloco(every=30, delay=1)" and s.replicas == 4)
    assert losses[1] < diloco.loss.value < losses[3]
    assert {warning.name for warning in signs[0].loss.warnings} >= {"streaming_sign-unfitted"}


def test_signs_with_fewer_bits_are_proposed_where_the_link_is_too_thin_for_the_recipe() -> None:
    """A sparser composition of the recorded frontier costs loss, so a link that carries the recipe gets the recipe."""
    wide, thin = (settings(task(link, methods=("streaming_sign",)))[0] for link in ("1gbit,10ms", "2mbit,10ms"))
    assert wide.run.method.codec is None and wide.run.method.every == expected.FORMS[0].every
    sparser = {(one.every, one.codec) for one in expected.FORMS[1:]}
    assert thin.replicas > 1 and (thin.run.method.every, thin.run.method.codec) in sparser
    assert thin.loss.value > wide.loss.value and thin.period_nbytes < wide.period_nbytes


def test_the_sparse_recipe_is_proposed_where_the_link_is_too_thin_for_signs() -> None:
    signs = ("streaming_sign", "streaming_sparse")
    wide, thin = (settings(task(link, methods=signs))[0] for link in ("1gbit,10ms", "2mbit,10ms"))
    assert wide.method == "streaming_sign" and thin.method == "streaming_sparse"
    assert thin.run.method.every == RECIPES["streaming_sparse"]().schedule.every and thin.run.method.codec is None
    assert {warning.name for warning in thin.loss.warnings} >= {"streaming_sparse-unfitted"}


def test_a_method_that_a_setting_of_the_run_rules_out_is_left_out_with_the_reason() -> None:
    robust = replace(BILLION, method=replace(BILLION.method, aggregate="GeometricMedian"))
    found = settings(task(base=robust))
    assert {setting.method for setting in found} == set(SEARCHED) - {"eager_diloco"}
    said = [text for text in explain.warnings(task(base=robust), found[0]) if text.startswith("method-refused")]
    assert len(said) == 1 and said[0].startswith("method-refused: eager_diloco: aggregate=GeometricMedian()")
    with pytest.raises(ConfigurationError, match=r"no planned method .* such as eager_diloco: aggregate"):
        settings(task(base=robust, methods=("eager_diloco",)))


def test_a_replica_with_thin_links_is_left_out() -> None:
    links = Links.uniform(Link(1e9, 0.01), 4)
    thin = {pair: Link(1e5, 0.01) if 2 in pair else link for pair, link in links.alone.items()}
    named = replace(task(), links=Links(("oslo", "lyon", "home", "rome"), thin))
    best = settings(named)[0]
    assert best.places == (0, 1, 3)
    assert any(text.startswith("left-out: home") for text in explain.warnings(named, best))


def test_a_site_with_too_little_memory_is_left_out_for_that_reason() -> None:
    small = replace(task(), machines=(GPU, GPU, replace(GPU, name="small", memory_nbytes=10**9), GPU))
    best = settings(small)[0]
    assert best.places == (0, 1, 3)
    assert "left-out: replica-2: too little memory for this setting" in explain.warnings(small, best)


def test_unequal_machines_and_directions_are_warnings() -> None:
    links = Links.uniform(Link(1e9, 0.01), 2)
    uneven = Links(links.names, {(0, 1): Link(1e9, 0.01), (1, 0): Link(1e10, 0.01)})
    both = replace(task(), links=uneven, machines=(GPU, replace(GPU, name="old", flops_per_second=1.1e14)))
    said = " ".join(explain.warnings(both, settings(both)[0]))
    assert "asymmetric-link: replica-0 → replica-1" in said and "unequal-machines: all wait for old" in said


def test_the_codec_of_a_run_file_is_planned_and_varying_sizes_are_a_warning() -> None:
    planned = task(
        base=replace(BILLION, method=replace(BILLION.method, strategy="streaming_diloco", codec="Entropy(E3M0())"))
    )
    found = settings(planned)
    assert {setting.method for setting in found if setting.strategy.bound} == {"streaming_diloco"}
    for setting in {setting.method: setting for setting in found}.values():  # all take a minute
        said = any(line.startswith("sizes-vary: sizes of Entropy") for line in explain.warnings(planned, setting))
        assert said == bool(setting.strategy.bound)


def test_the_micro_batch_follows_from_the_memory() -> None:
    large, small = (settings(replace(task(), memory_nbytes=limit))[0] for limit in (80 * 10**9, 40 * 10**9))
    assert small.run.data.batch < large.run.data.batch and small.memory_nbytes <= 40 * 10**9
    strategy = small.run.make_strategy()
    again = replica_memory(
        SIZES["1b"], strategy, [SIZES["1b"].parameters()], 4,
        batch=small.run.data.batch, sequence=2048, accumulate=small.run.data.accumulate, bf16=True,
    )  # fmt: skip
    assert again.peak("device") == pytest.approx(small.memory_nbytes, rel=0.02)


# ---- targets that cannot be met


def test_contradicting_targets_are_named(found: list[Setting]) -> None:
    fast, good = Targets(deadline_seconds=4.6 * 86400), Targets(loss=2.45)
    assert meeting(found, fast, task()) and meeting(found, good, task())
    with pytest.raises(
        ConfigurationError,
        match=r"deadline <= 4 d 14 h and loss <= 2.45 contradict each other here: .* the best is 2\.4",
    ):
        meeting(found, Targets(deadline_seconds=4.6 * 86400, loss=2.45), task())


@pytest.mark.parametrize(
    ("targets", "says"),
    [
        (Targets(loss=1.0), r"no setting meets loss <= 1.0: the best is 2\."),
        (Targets(deadline_seconds=60, utilization=0.5), r"no setting meets deadline <= 1 min 0 s: the best is"),
    ],
)
def test_a_target_that_no_setting_meets_is_named(found: list[Setting], targets: Targets, says: str) -> None:
    with pytest.raises(ConfigurationError, match=says):
        meeting(found, targets, task())


def test_a_model_that_is_too_large_is_refused_with_settings_that_fit() -> None:
    tight = task(memory_nbytes=20 * 10**9)
    with pytest.raises(
        ConfigurationError, match=r"no setting of 1b fits: .* What would fit: --ranks 4: .*; or --model 500m"
    ):
        meeting(settings(tight), Targets(), tight)


@pytest.mark.parametrize(
    "wish", [{"utilization": 0.0}, {"utilization": 1.01}, {"deadline_seconds": -1.0}, {"loss": float("nan")}]
)
def test_invalid_targets_are_refused(wish: dict[str, float]) -> None:
    with pytest.raises(ConfigurationError, match="is needed"):
        Targets(**wish)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"machines": (GPU, GPU)}, "2 machines for 4 replicas"),
        ({"methods": ("gossip",)}, "methods gossip: some of"),
        ({"tokens": 0.0}, "more than 0"),
        ({"ranks": 0}, "ranks=0: 1 to 1024 are needed"),
        ({"ranks": 100_000}, "ranks=100000: 1 to 1024 are needed"),
    ],
)
def test_invalid_tasks_are_refused(change: dict[str, object], says: str) -> None:
    with pytest.raises(ConfigurationError, match=says):
        task(**change)


# ---- the command


def test_probe_plan_and_train_work_in_sequence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On an emulated link. The run file of the plan trains without changes."""
    monkeypatch.setattr("thinwire.app.trainer.data.default_cache", lambda: tmp_path / "cache")
    monkeypatch.chdir(tmp_path)
    Path("text.txt").write_text("All that glisters is not gold. " * 4000)
    small = ["--model", "nano", "--sequence", "16"]
    assert main(["probe", "--link", "20mbit,2ms", "--seconds", "0.05", "--trips", "2", *small]) == 0
    capsys.readouterr()
    text = ["--text", "text.txt", "--tokens", "4k", "--out", "new/plan.toml", "--json"]
    assert main(["plan", "links.toml", "machine.toml", *small, *text]) == 0
    plan = json.loads(capsys.readouterr().out)
    best = plan["settings"][0]
    assert plan["word"] == "predicted" and plan["links"] == "emulated" and 0 < plan["refused"][0]["utilization"] < 1
    run = Run.load(tmp_path / "new/plan.toml")
    assert (run.method.label, run.optimizer.steps, run.placement.replicas) == (
        best["strategy"],
        best["steps"],
        best["replicas"],
    )
    assert run.placement.replicas == 1 or run.placement.link != "none"
    assert (
        main(["train", "new/plan.toml", "--carrier", "threads", "--out", "run", "--eval-batches", "1", "--json"]) == 0
    )
    summary = json.loads(capsys.readouterr().out)
    assert summary["steps"] == run.optimizer.steps and summary["tokens"] >= 4000


def test_the_printed_command_names_the_ranks_of_a_site(plan: Callable[..., Any]) -> None:
    GPU.save(Path("gpu.toml"))
    model = "--model 1b --tokenizer bpe:32000 --sequence 2048"
    code, out, _ = plan(f"1gbit,20ms gpu.toml --replicas 4 --ranks 8 --degrees 2,8,8 --levels 2 {model}")
    told = " ".join(out.split())
    assert code == 0 and "exchange (predicted): a round of the largest fragment" in told and "around a ring" in told
    assert "--nproc_per_node 8" in told and "ZeRO-3 (FSDP2)" in told and "2, 8, 8 │ three levels" in told


def test_short_host_memory_puts_outer_state_on_disk_and_says_what_the_disk_must_carry(tmp_path: Path) -> None:
    """Only where no micro-batch fits otherwise; a place that the run names is kept; on a GPU anchors are not limited."""
    base = Run.of(model="300m", sequence=128)
    cpu = Machine("laptop", memory_nbytes=24 * 10**9, flops_per_second=3e10, disk_nbytes_per_second=1e6)
    wide = task("100mbit,20ms", 2, base=base, machines=(cpu,), batch_tokens=256, methods=("streaming_sign",))
    assert {setting.strategy.anchors for setting in settings(wide)} == {"host"}
    host = min(setting.memory_nbytes for setting in settings(wide))
    tight = replace(wide, memory_nbytes=int(0.95 * host))
    best = settings(tight)[0]
    assert best.fits and best.run.method.anchors == best.strategy.anchors == "disk"
    on_disk = sum(nbytes for (place, _), nbytes in best.memory.kept.items() if place == "disk")
    assert on_disk == 2 * 4 * best.memory.kept["device", "parameters"] // 4  # anchors and feedback
    (told,) = [one for one in explain.warnings(tight, best) if one.startswith("anchors-on-disk")]
    assert "2.36 GB are in a file" in told and "the disk does 1.00 MB/s and is too slow" in told
    named = replace(tight, base=base.changed(anchors="host"))
    assert {setting.strategy.anchors for setting in settings(named)} == {"host"}
    best.run.save(tmp_path / "run.toml")
    assert Run.load(tmp_path / "run.toml").make_strategy().anchors == "disk"


def test_on_a_gpu_that_has_room_anchors_are_there_if_rounds_can_run_there() -> None:
    """With less memory, and for a method whose rounds run on the CPU, they stay in host memory."""
    methods = ("streaming_sign", "streaming_diloco", "data_parallel")
    base, taken = task(methods=methods), {method: "host" for method in methods}
    assert {one.method: one.strategy.anchors for one in settings(base)} == taken | {"streaming_sign": "device"}
    there = next(one for one in settings(base) if one.method == "streaming_sign" and one.run.placement.replicas == 4)
    assert there.run.method.anchors == "device" and there.memory_nbytes == there.memory.peak("device")
    tight = replace(base, memory_nbytes=there.memory.peak("device") // 2)
    assert {one.method: one.strategy.anchors for one in settings(tight)} == taken
    name, slow, fast = there.candidate.codecs[0], (CodecSpeed(1e8, 1e8),), (CodecSpeed(1e11, 1e11),)
    timed = replace(base, machines=(replace(GPU, codecs={name: slow}, on_gpu={name: fast}),))
    encoding = {
        one.strategy.anchors: one.traffic[0].encode_seconds
        for task in (timed, replace(timed, memory_nbytes=tight.memory_nbytes))
        for one in settings(task)
        if one.candidate.codecs[0] == name
    }
    assert encoding["host"] == pytest.approx(1000 * encoding["device"])


@pytest.mark.parametrize(("step_seconds", "rarer"), [(0.001, True), (0.012, False), (1.0, False)])
def test_short_steps_of_cores_that_train_prefer_rarer_rounds(step_seconds: float, rarer: bool) -> None:
    """A round costs milliseconds of a core, whatever the model. If that exceeds a bound, a plan says so."""
    base = Run.of(model="nano", sequence=32)
    flops = 64 * 32 * shape_of(base).flops_per_token(32) / step_seconds
    cpu = Machine("laptop", memory_nbytes=16 * 10**9, flops_per_second=flops)
    free = replace(cpu, price=RoundPrice(0.0, 0.0, 0.0, 0.0))
    methods = ("streaming_sign", "streaming_diloco")
    short = task("1gbit,100us", 2, base=base, batch_tokens=128 * 32, tokens=1.6e7, methods=methods)
    best, unpriced = (settings(replace(short, machines=(each,)))[0] for each in (cpu, free))
    assert unpriced.method == "streaming_sign" and not unpriced.pace.taken
    every = best.strategy.schedule.every
    assert (every >= 4 * unpriced.strategy.schedule.every) == rarer
    told = [line for line in explain.warnings(replace(short, machines=(cpu,)), best) if "rounds-are-dear" in line]
    assert bool(told) == (best.pace.taken > DEAR)
    assert f"takes {text_of_share(best.pace.taken)} of the time of the cores that train" in told[0] if told else True
