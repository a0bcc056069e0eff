"""The bytes that a follower fetches, beside a full copy, and what publishing costs training. Five minutes on two cores.

    python benchmarks/follow.py [--steps 360] [--into FILE]

Two replicas train the model nano; one publishes each version of the agreed weights. Followers come after every round, every 10 and
every 100 rounds, and fetch what leads from their version to the newest. Bytes are everything that they fetch, lists included, as
the mean of their visits after the first. A full copy has the weights in bf16. Each version is checked bit for bit. Measured.
Cost: replicas of the model mini, as threads on one core each, train in windows with and without publishing in the order ABBA; seconds are
those of the replica that publishes, as ratios of neighbouring windows.
"""

from __future__ import annotations

import argparse
import math
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median, stdev
from typing import Any

import torch
from provenance import provenance, save
from safetensors.torch import load_file, save_file

import thinwire as tw
from thinwire.app.records.published import Publication, PublishedFolder
from thinwire.app.trainer.data import Corpus
from thinwire.app.trainer.follow import Followed, WeightsFollower
from thinwire.app.trainer.publish import Publisher
from thinwire.app.trainer.run import Run
from thinwire.app.trainer.setup import learning_rate, make_model, make_optimizer
from thinwire.app.trainer.tokenizer import open_corpus

LAGS = (1, 10, 100)
WINDOWS, WINDOW = 16, 30
RUN = Run.of(model="nano", batch=4, sequence=64, replicas=2)
RUNS = {
    "streaming_sign, the default": RUN,
    "streaming_diloco": RUN.changed(strategy="streaming_diloco", every=8),
    "streaming_sign": RUN.changed(lr=1e-5),
}


@dataclass
class Training:
    """A replica that trains and, if it is replica 0, publishes."""

    attached: tw.Replica
    publisher: Publisher | None
    landed: list[int]  # steps of the rounds that landed since the last version
    step: Callable[[int], None]


@contextmanager
def training(run: Run, group: tw.Group, corpus: Corpus, folder: Path) -> Iterator[Training]:
    model = make_model(run.model, run.data.sequence, run.seed, corpus.vocabulary)
    optimizer = make_optimizer(run, model)
    landed: list[int] = []

    def hear(event: str, step: int, **_: object) -> None:
        landed.extend([step] * (event == "land"))

    def step(number: int) -> None:
        optimizer.param_groups[0]["lr"] = learning_rate(run, number + 1)
        tokens, targets = corpus.batch(
            run.seed, group.rank, group.size, number, run.data.largest_batch, run.data.sequence
        )
        model(tokens, targets).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), run.optimizer.clip or math.inf)
        optimizer.step()
        optimizer.zero_grad()

    def write_model(out: Path) -> None:
        save_file(dict(model.named_parameters()), out / "model.safetensors")

    with tw.Replica(run.make_strategy(), model, optimizer, group, observer=hear) as attached:
        place = folder / "published" / "replica-0"
        publisher = None if group.rank else Publisher(place, attached.fragments, write_model, print)
        yield Training(attached, publisher, landed, step)
        if publisher:
            publisher.close()


def measure(run: Run, steps: int) -> list[dict[str, Any]]:
    run = run.changed(steps=steps)
    corpus = open_corpus(run.data, run.model.model)
    visits: dict[int, list[Followed]] = {lag: [] for lag in LAGS}
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        followers = {lag: WeightsFollower(PublishedFolder(folder), folder / f"every-{lag}") for lag in LAGS}

        def visit(publisher: Publisher, version: int, attached: tw.Replica) -> None:
            anchors = attached.anchors()
            publisher.offer(attached.step, anchors)
            while not (text := PublishedFolder(folder).newest()) or Publication.read(text).version < version:
                time.sleep(0.001)
            for lag, follower in followers.items():
                if (version - 1) % lag == 0:
                    found = follower.update()
                    assert found is not None
                    visits[lag].append(found)
            here = torch.cat([v.flatten() for v in load_file(folder / "every-1/model.safetensors").values()])
            due = torch.cat([anchor.bfloat16() for anchor in anchors])
            assert torch.equal(here.view(torch.int16).sort()[0], due.view(torch.int16).sort()[0])

        def replica(group: tw.Group) -> None:
            with training(run, group, corpus, folder) as one:
                version = 1
                if one.publisher:
                    visit(one.publisher, version, one.attached)
                for step in range(steps):
                    one.step(step)
                    if one.publisher and one.landed:
                        one.landed.clear()
                        version += 1
                        visit(one.publisher, version, one.attached)

        tw.run_threads(2, replica, timeout=600.0)
    rows = []
    for lag, seen in visits.items():
        full, later = seen[0].full_nbytes, seen[1:]
        nbytes = fmean(one.nbytes for one in later)
        copies = sum(one.copied for one in later) / sum(one.fragments for one in later)
        rows.append(
            {"rounds": lag, "visits": len(later), "nbytes": nbytes, "full_nbytes": full, "share": nbytes / full,
             "first_nbytes": seen[0].nbytes, "copied": copies}
        )  # fmt: skip
    return rows


def cost(replicas: int) -> dict[str, Any]:
    """Seconds a step with publishing, as the loop of `thinwire train` does it, against without."""
    run = Run.of(model="mini", batch=4, sequence=64, replicas=replicas, steps=WINDOWS * WINDOW)
    corpus = open_corpus(run.data, run.model.model)
    seconds, copies = list[float](), list[float]()

    def replica(group: tw.Group) -> None:
        with tempfile.TemporaryDirectory() as place, training(run, group, corpus, Path(place)) as one:
            for window in range(WINDOWS):
                while one.publisher and not one.publisher.idle:
                    time.sleep(0.001)
                publishes, began = window % 4 in (1, 2), time.monotonic()
                for step in range(window * WINDOW, (window + 1) * WINDOW):
                    one.step(step)
                    if one.publisher and publishes and one.landed and one.publisher.idle:
                        one.landed.clear()
                        offered = time.monotonic()
                        one.publisher.offer(one.attached.step, one.attached.anchors())
                        copies.append(time.monotonic() - offered)
                if one.publisher:
                    seconds.append((time.monotonic() - began) / WINDOW)

    tw.run_threads(replicas, replica, timeout=600.0)
    ratios = [
        seconds[pair + 1] / seconds[pair] if pair % 4 == 0 else seconds[pair] / seconds[pair + 1]
        for pair in range(0, WINDOWS, 2)
    ]
    return {
        "replicas": replicas, "model": "mini", "windows": WINDOWS, "steps_a_window": WINDOW, "seconds_per_step": seconds,
        "ratio": median(ratios), "spread": stdev(ratios), "ratios": ratios, "versions": len(copies),
        "copy_seconds": median(copies),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=360, help="inner steps of each run")
    parser.add_argument("--into", type=Path, help="the file to write")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    began, rows = time.monotonic(), []
    for name, run in RUNS.items():
        for row in measure(run, asked.steps):
            rows.append({"run": f"{name}, learning rate {run.lr:g}", **row})
            print(
                f"{rows[-1]['run']:<50} {row['rounds']:>4} rounds: {row['nbytes']:>10,.0f} bytes of {row['full_nbytes']:,} "
                f"({row['share']:.1%}), {row['copied']:.0%} of fragments copied, {row['visits']} visits"
            )
    costs = [cost(replicas) for replicas in (1, 2)]
    for row in costs:
        print(
            f"{row['replicas']} replicas on 2 cores: a step takes {row['ratio']:.3f} ± {row['spread']:.3f} of a step without publishing, "
            f"{row['versions']} versions, {row['copy_seconds'] * 1e3:.1f} ms of the main thread each"
        )
    result = {
        "benchmark": "follow", "word": "measured", **provenance(), "seconds": time.monotonic() - began,
        "setting": {"steps": asked.steps, "model": "nano", "replicas": 2, "seed": 0}, "rows": rows, "costs": costs,
    }  # fmt: skip
    print(save("follow", result, asked.into))


if __name__ == "__main__":
    main()
