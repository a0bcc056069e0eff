"""Files of links and machines that users write: reading, saving, errors with their place, and a measured machine."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from thinwire.app.plan import compute, search
from thinwire.app.plan.links import Links
from thinwire.app.plan.machine import CodecSpeed, Machine, RoundPrice, Step
from thinwire.app.trainer.model import SIZES
from thinwire.app.trainer.run import Run
from thinwire.comm import Link
from thinwire.errors import ConfigurationError

LEAST = 'memory = "1GB"\nflops_per_second = 1\n'
BY_HAND = """
names = ["oslo", "lyon", "home"]
[[link]]
between = ["oslo", "lyon"]
alone = "1gbit,15ms"
[[link]]
from = "home"
to = "oslo"
alone = "20mbit,8ms"
together = "10mbit"
[[link]]
from = "oslo"
to = "home"
alone = "100mbit,8ms"
[[link]]
between = ["home", "lyon"]
alone = "20mbit,12ms"
"""


def written(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "facts.toml"
    path.write_text(text)
    return path


def test_a_links_file_is_read_and_saved(tmp_path: Path) -> None:
    links = Links.load(written(tmp_path, BY_HAND))
    assert len(links) == 3 and links.alone[1, 0] == links.alone[0, 1] == Link(1e9, 0.015)
    assert links.together == {(2, 0): 10e6} and links.asymmetric() == [(2, 0)]
    assert links.among([2, 0]).alone == {(0, 1): Link(20e6, 0.008), (1, 0): Link(100e6, 0.008)}
    links.save(tmp_path / "again.toml", comment="two\nlines")
    assert Links.load(tmp_path / "again.toml") == links
    assert (tmp_path / "again.toml").read_text().startswith("# two\n# lines\n")


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ('from = "oslo"\nto = "home"', 'from = "home"\nto = "lyon"', "link 4: home → lyon is given twice"),
        (
            '[[link]]\nfrom = "oslo"\nto = "home"\nalone = "100mbit,8ms"\n',
            "",
            "oslo → home is missing; the opposite direction is",
        ),
        (
            '[[link]]\nbetween = ["home", "lyon"]\nalone = "20mbit,12ms"\n',
            "",
            r"lyon → home \(and 1 more\) is missing; every",
        ),
        ('alone = "1gbit,15ms"', 'alone = "1Gbps"', "link 1: the link '1Gbps' was given; a rate"),
        ('alone = "1gbit,15ms"', 'alone = "0mbit"', "link 1: a rate of 0.0 bit/s was given; a positive rate"),
        ('alone = "1gbit,15ms"', 'alone = "-5mbit"', "link 1: the link '-5mbit' was given"),
        ('alone = "1gbit,15ms"\n', "", "link 1: the link '' was given"),
        ('together = "10mbit"', 'together = "10"', "link 2: the link '10' was given"),
        ('to = "oslo"', 'to = "olso"', "link 2: 'olso' is not among names"),
        ('to = "oslo"', 'to = "home"', "link 2: from and to"),
        ('together = "10mbit"', 'speed = "10mbit"', "link 2: speed not known"),
        ('names = ["oslo", "lyon", "home"]', 'names = ["oslo", "lyon", "home", "home"]', "all different"),
        ('names = ["oslo", "lyon", "home"]', "names = 3", "names ="),
        ("[[link]]", "[[link]", "cannot be read"),
    ],
)
def test_errors_in_a_links_file_name_their_place(tmp_path: Path, old: str, new: str, says: str) -> None:
    assert old in BY_HAND
    with pytest.raises(ConfigurationError, match=says):
        Links.load(written(tmp_path, BY_HAND.replace(old, new, 2 if old == "[[link]]" else 1)))


def machine() -> Machine:
    shape = SIZES["tiny"]
    return Machine(
        name="oslo", memory_nbytes=16_000_000_000, flops_per_second=5e10, model="tiny", sequence=128,
        flops_per_token=float(shape.flops_per_token(128)), parameters=shape.parameters(),
        steps=(Step(1, 0.02, 60_000_000), Step(4, 0.05, None)), update_seconds=0.001,
        codecs={"E3M0()": (CodecSpeed(1e8, 4e8, 10**6), CodecSpeed(5e7, 4e8, 10**8))}, base_nbytes=530_000_000,
        on_gpu={"Sign()": (CodecSpeed(1e11, 2e11, 10**6),)},
        disk_nbytes_per_second=4e8, threads=4, price=RoundPrice(1e-3, 1e-4, 1e-9, 2e-3), word="measured",
    )  # fmt: skip


def test_a_saved_machine_file_is_read_back(tmp_path: Path) -> None:
    machine().save(tmp_path / "machine.toml", "hand\nmade")
    assert Machine.load(tmp_path / "machine.toml") == machine()


def test_memory_and_flops_are_enough_for_a_machine_file(tmp_path: Path) -> None:
    own = Machine.load(written(tmp_path, 'memory = "16GB"\nflops_per_second = 1e12\n'))
    assert (own.name, own.memory_nbytes) == ("facts", 16 * 10**9)
    shape = SIZES["35m"]
    expected = 8 * 512 * shape.flops_per_token(512) / 1e12
    assert own.inner_seconds(shape, 512, batch=8) == pytest.approx(expected)
    assert own.warnings(shape, 512)[0].name == "step-time-scaled"


def test_measured_step_times_are_used_and_scaled_for_other_batches() -> None:
    own, tiny = machine(), SIZES["tiny"]
    assert own.inner_seconds(tiny, 128, batch=4, accumulate=2) == pytest.approx(2 * 0.05 + 0.001)
    assert own.micro_seconds(tiny, 128, 8) == pytest.approx(2 * 0.05)
    assert own.micro_seconds(tiny, 128, 2) == pytest.approx(0.03)  # between the two sizes that were measured
    assert not own.warnings(tiny, 128) and own.warnings(replace(tiny, layers=5), 128)
    assert own.codec_seconds(["E3M0()"], 10**6, packets=2) == pytest.approx(0.01 + 0.005)
    # Between the two sizes that were timed.
    assert own.codec_seconds(["E3M0()"], 10**7, packets=0) == pytest.approx(0.1 * 2**0.5)
    assert own.codec_seconds(["E3M0()"], 10**9, packets=0) == pytest.approx(20.0)
    assert own.codec_seconds(["Each(E3M0())", "Sign()"], 10**6, packets=2) == 0.0


def test_the_work_of_a_round_takes_turns_with_cores_that_train_and_none_of_a_gpu() -> None:
    """The main thread does its part alone; the other part is divided among the cores."""
    assert machine().taken_seconds(10, 10**6, codec_seconds=2e-3) == pytest.approx(1e-3 + 1e-3 + 1e-3 + 4e-3 / 4)
    assert replace(machine(), device="cuda").taken_seconds(10, 10**6, codec_seconds=2e-3) == 0.0


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (f"{LEAST}threads = 0", "threads=0: more than 0 is needed"),
        (f"{LEAST}[round]\nmain_seconds = -1", "main_seconds=-1.0 of a round: 0 or more is needed"),
        (f"{LEAST}[round]\nsheep = 1", "sheep"),
        ("flops_per_second = 1e12", "memory missing"),
        ('memory = "16GB"', "flops_per_second missing"),
        ('memory = "16 sheep"\nflops_per_second = 1', "'16 sheep' was given; a size is needed"),
        ('memory = "0GB"\nflops_per_second = 1', "a size of at least 1 is needed"),
        ('memory = "1GB"\nflops_per_second = -1', "more than 0 is needed"),
        ('memory = "1GB"\nflops_per_second = nan', "more than 0 is needed"),
        (
            'memory = "1GB"\nflops_per_second = 1\ndevice = "banana"',
            "device='banana' of 'facts': cpu or cuda is needed",
        ),
        ('memory = "1GB"\nflops_per_second = 1\nbase = "0MB"', "a size of at least 1 is needed"),
        (
            f"{LEAST}[[codec]]\nname = 'E3M0()'\nencode = 0.0\ndecode = 1e9",
            "a codec's encode=0.0: more than 0 is needed",
        ),
        (
            f"{LEAST}[[codec]]\nname = 'E3M0()'\nencode = 1e9\ndecode = nan",
            "a codec's decode=nan: more than 0 is needed",
        ),
        (f"{LEAST}[[codec]]\nname = 'E3M0()'\nparameters = -1\nencode = 1\ndecode = 1", "a codec's parameters=-1"),
        (f"{LEAST}[steps]\nupdate_seconds = -1", "update_seconds=-1.0: 0 or more is needed"),
        (f"{LEAST}[[step]]\nbatch = 1\nseconds = 1", "sequence of the measured steps=0: more than 0 is needed"),
        ('memory = "1GB"\nflops_per_second = 1\n[[step]]\nbatch = 1', "'seconds'"),
        ('memory = "1GB"\nflops_per_second = 1\n[[step]]\nbatch = 0\nseconds = 1', "both must be more than 0"),
    ],
)
def test_errors_in_a_machine_file_are_named(tmp_path: Path, text: str, says: str) -> None:
    with pytest.raises(ConfigurationError, match=says):
        Machine.load(written(tmp_path, text))


def test_probe_machine_measures_steps_and_codecs(tmp_path: Path) -> None:
    run = Run.of(model="nano", sequence=32)
    own = compute.probe_machine(run, "here", 10**9, search.codecs(run), seconds=0.02, place=tmp_path)
    assert own.parameters == compute.shape_of(run).parameters() and own.word == "measured"
    assert own.steps[0].batch == 1 and all(step.seconds > 0 for step in own.steps)
    assert own.price.main_seconds > 0 and own.price.beside_seconds > 0 and own.threads == torch.get_num_threads()
    assert own.flops_per_second > 0 and own.base_nbytes > 100_000_000  # torch alone takes more
    assert {c.parameters for timed in own.codecs.values() for c in timed} == {own.parameters}  # the largest fragment
    assert not list(tmp_path.iterdir())
    task = search.Task(run, Links.uniform(Link.parse("50mbit,30ms"), 3), (own,), tokens=1e6)
    assert all(setting.candidate.codecs[0] in own.codecs for setting in search.settings(task)), "no codec is free"


@pytest.mark.parametrize("change", [{"model": "hf:somewhere"}, {"tokenizer": "bpe:words.json"}])
def test_models_and_tokenizers_that_are_missing_are_refused(change: dict[str, str]) -> None:
    with pytest.raises(
        ConfigurationError, match=r"needed here|package transformers is needed|a folder with config\.json, a hub name"
    ):
        compute.shape_of(Run.of(**change))  # type: ignore[arg-type]
