"""What must not change while modules move: weights, bytes, pieces, commands. Records it before a change, and compares it after.

    python benchmarks/unchanged.py record FILE [--only WORD ...] [--jobs 2]
    python benchmarks/unchanged.py compare FILE [--only WORD ...] [--jobs 2]

`record` writes what the thinwire of this interpreter does; `compare` does the same again, prints a table of what differs, and exits
with 1 if anything does. The parts:

- `recipes`, `compositions`: each recipe, and strategies that no recipe has, over threads: what the strategy prints, bytes predicted and
  counted, digests of weights, anchors and state. `resumed`: runs that are saved in the middle, mostly with rounds in flight.
- `processes`: fixed groups over torch.distributed, sharded sites, the hook of DDP. `elastic`: a member dies and another one comes.
- `solvers`: saddle points, DADAO, gradient codes.
- `train ...`: the command on each carrier, also with the methods that have their own loops: models and newest checkpoints. `hub` too.
- `pieces`: public names, pieces and what they print with their defaults, what the command offers where a piece is needed.
- `verbs`: the options of each verb, with their defaults. `keys ...`: the keys of what each verb prints with `--json`, without values.

**A recording is for one machine**: libraries round differently on another processor, or in another version. Take it from the same
machine, interpreter and packages; `compare` says if one of these is another. What follows a clock has no place here: a run either
has a clock that stands still or virtual time, or waits for the others at each round. Two recordings of one tree must be equal: record,
then compare at once. --only: the parts whose names begin with one of these words; recorded, they are put into FILE beside the others.
"""

from __future__ import annotations

import argparse
import hashlib
import inspect
import json
import multiprocessing
import os
import re
import runpy
import signal
import socket
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import torch
from provenance import provenance
from safetensors.torch import load_file
from torch import Tensor, nn

import thinwire as tw
from thinwire import checkpoint
from thinwire.catalogue.methods import RECIPES

# These names may move; if they do, change these lines and nothing else. All else is found by text and by the command.
from thinwire.catalogue.parsing import PIECES, parse
from thinwire.comm import CountedGroup, Ledger, start_torch
from thinwire.lab.methods import Cyclic, Dadao, Extragradient, Masha1, Masha2, Multiplexed, Repetition, Saddle, saddle
from thinwire.membership import LighthouseRendezvous, Membership, Timeouts

LIMIT = 900.0  # seconds after which a process counts as failed; it only ends a hang
STEPS = 14
FORK = multiprocessing.get_context("fork")  # a fresh process for each run, without importing torch again
Finding = dict[str, Any]


# ---- a toy of some thousand parameters


class Toy(nn.Module):
    """A model with layers, for partitions, and with odd sizes, for codecs."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(7, 31)
        self.layers = nn.ModuleList(nn.Linear(31, 31) for _ in range(4))
        self.head = nn.Linear(31, 3)
        generator = torch.Generator().manual_seed(1)  # threads share torch's own
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        out: Tensor = self.head(x)
        return out


def loss_of(model: nn.Module, rank: int, step: int) -> Tensor:
    x = torch.randn(8, 7, generator=torch.Generator().manual_seed(1000 * step + rank))
    out: Tensor = model(x)
    return (out - x[:, :3].sin() * (1 + rank)).square().mean()


def inner_step(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, step: int) -> None:
    def closure() -> float:
        optimizer.zero_grad()
        loss = loss_of(model, rank, step)
        loss.backward()  # type: ignore[no-untyped-call]
        return float(loss.detach())

    if hasattr(optimizer, "perturbed"):  # it needs the gradient at two points
        optimizer.step(closure)
    else:
        closure()
        optimizer.step()


def optimizer_of(strategy: tw.Strategy, model: nn.Module) -> torch.optim.Optimizer:
    if strategy.inner:
        return strategy.inner.make(model, 0.01 / strategy.inner.lr_factor, 0.1)
    return torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)


def digest(tensors: Sequence[Tensor]) -> str:
    """A digest of the bits of tensors, of their types and shapes."""
    seen = hashlib.sha256()
    for tensor in tensors:
        whole = tensor.detach().cpu().contiguous()
        seen.update(f"{whole.dtype} {tuple(whole.shape)};".encode())
        seen.update(whole.reshape(-1).view(torch.uint8).numpy().tobytes() if whole.numel() else b"")
    return seen.hexdigest()[:16]


def by_name(tensors: Mapping[str, Any]) -> list[Tensor]:
    """The tensors in the order of their names; the names themselves are no bits of the training."""
    return [value for _, value in sorted(tensors.items()) if isinstance(value, Tensor)]


# ---- over threads


def still() -> float:
    """A clock that stands still."""
    return 0.0


def replica_of(
    strategy: tw.Strategy, group: Any, model: nn.Module | None = None, **more: Any
) -> tuple[tw.Replica, torch.optim.Optimizer]:
    model = model or Toy()
    optimizer = optimizer_of(strategy, model)

    def validation() -> list[float]:
        return [float(loss_of(model, -1, number)) for number in range(2)]

    ignored: Callable[..., None] = lambda event, step, **fields: None  # noqa: E731
    settings = {"validation": validation, "clock": still, "observer": ignored} | more
    return tw.Replica(strategy, model, optimizer, group, **settings), optimizer


def trained(strategy: tw.Strategy, group: Any, model: nn.Module | None = None, **more: Any) -> Finding:
    """Train one replica. Its digests; the anchors and the state are those before the last round."""
    attached, optimizer = replica_of(strategy, group, model, **more)
    with attached as replica:
        for step in range(1, STEPS + 1):
            inner_step(replica.model, optimizer, group.rank, step)
        anchors, (tensors, _) = digest(replica.anchors()), replica.state()
        state = digest(by_name(tensors))
    return {"weights": digest([*replica.model.parameters()]), "anchors": anchors, "state": state}


def over_threads(strategy: tw.Strategy, replicas: int) -> Finding:
    ledgers = [Ledger() for _ in range(replicas)]

    def replica(group: tw.Group) -> Finding:
        return trained(strategy, CountedGroup(group, ledgers[group.rank]))

    found = dict(enumerate(tw.run_threads(replicas, replica, timeout=LIMIT)))
    fragments = [fragment.shapes for fragment in strategy.partition.fragments(Toy())]
    return {
        "repr": repr(strategy),
        "replicas": found,
        "bytes counted": [ledger.sent("packet") for ledger in ledgers],
        "bytes predicted": [strategy.nbytes_per_period(fragments, replicas, number) for number in (0, 1, 100)],
    }


def attempted(call: Callable[[], Any]) -> Any:
    """What the call returns; if it raises, the error, which `record` reports."""
    try:
        return call()
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}


def recipes() -> Finding:
    """Each recipe with short periods; and what its strategy prints with its defaults."""
    found = {}
    makers: dict[str, Callable[..., tw.Strategy]] = RECIPES
    for name, recipe in makers.items():
        short = {"every": 4, "delay": 1, "freeze": 4, "fragments": 2}
        taken = {key: value for key, value in short.items() if key in inspect.signature(recipe).parameters}
        strategy = recipe(**taken)
        replicas = 2 if strategy.exchange.traits.agrees else 4
        found[name] = {"defaults": repr(recipe())} | attempted(partial(over_threads, strategy, replicas))
    return found


# By the number of replicas: the strategies, without "Strategy(" and ")", and calls of recipes.
COMPOSITIONS = {
    1: "schedule=Every(4)",
    2: """
schedule=Every(4), aggregate=MeanOverSenders(), codec=TopK(0.1)
schedule=Every(3, 1), codec=LowRank(2), feedback=Feedback(), merge=Mix(0.5)
schedule=Every(3, 2), partition=Strided(2), codec=LowRank(1), feedback=Feedback(), exchange=AllReduce(), outer=Nesterov()
schedule=Every(4), exchange=Fastest('20mbit,40ms')
schedule=Every(4, 1), codec=Levelled((Int(8), Sign()), skips=1), feedback=Feedback()
schedule=Every(4), codec=Levels()
schedule=Every(4), codec=Each(TopK(0.2), Cast())
schedule=Every(4), codec=Codebook()
schedule=Every(4, 2), codec=Entropy(TopK(0.5, E3M0(8, rounding='stochastic'))), feedback=Feedback(), seed=3
schedule=Every(2), codec=Squares(DCT(ChunkedTopK(4, 2), 2, axes=2), 2), feedback=Feedback(eta=0.99), outer=Nesterov()
schedule=Every(4), privacy=Privacy(0.5, 1e-30)
schedule=Every(4, 3), codec=TopK(0.05), policy=DensityWarmup(1, (0.9, 0.3, 0.1)), feedback=Feedback(), merge=Mix(0.5)
schedule=Quadratic(3, 0.06, 1.0, delay=2), partition=Strided(2), outer=Nesterov(0.5, 0.5)
schedule=Staggered(4, 4), partition=Strided(2), codec=E2M1(), outer=DelayedNesterov(), merge=Reset()
schedule=Staggered(5, 5), partition=Strided(3), codec=E3M0(), merge=Eager()
schedule=Every(4, 1), codec=TopK(0.2), feedback=Feedback(), merge=KeepUnsent()
schedule=Every(4, 1), partition=Strided(2), outer=HeavyBall(), anchors='disk'
schedule=Every(4, 1), codec=E3M0(8), feedback=Feedback(1, 0.5, 1.0), outer=Nesterov(), state_dtype='bf16'
schedule=Every(2), outer=Nesterov(), guard=Guard(z=0.1, warm_up=2)
schedule=Every(4), inner=SAM(AdamW())
schedule=Every(4), inner=Muon()
signal=Gradients(), partition=BySize(2), codec=TopK(0.5), feedback=Feedback()
signal=Gradients(), partition=BySize(2), codec=Cast(), exchange=AllReduce()
""",
    3: """
schedule=Every(4), aggregate=Median(), codec=E3M0(32)
schedule=Every(4), aggregate=GeometricMedian()
schedule=Every(4), aggregate=CenteredClipping()
schedule=Every(3, 1), aggregate=FoolsGold(), exchange=TwoShot()
schedule=Every(3, 1), codec=Sign(), feedback=Feedback(), exchange=TwoShot(Feedback()), merge=Mix(0.5)
schedule=Every(4), exchange=Star(0)
schedule=Staggered(6, 5), partition=Sequential(3), codec=E3M0(4), outer=Nesterov(), merge=Mix(0.5)
""",
    4: """
schedule=Staggered(4, 2), partition=Strided(2), exchange=Hierarchy((2, 2), Feedback()), codec=Sign(), merge=Mix(0.5)
d_psgd(every=3, delay=2, topology=Torus(2), rule=CombineThenAdapt(), partition=BySize(2))
d_psgd(every=2, topology=RandomRegular(2))
d_psgd(every=2, topology=Cut(Ring(), 2, 4))
choco(every=2, delay=1, step=0.2, topology=Exponential(), codec=TopK(0.2))
""",
    5: """
schedule=Every(4), aggregate=Krum(1)
schedule=Every(4), aggregate=NearestNeighbourMixing(MultiKrum(1), 1)
schedule=Every(4, 1), aggregate=TrimmedMean(1)
""",
}


def parsed(text: str) -> tw.Strategy:
    """The strategy of a line above."""
    call = text if re.match(r"\w+\(", text) else f"Strategy({text})"
    made: tw.Strategy = parse(call, {**PIECES, **RECIPES})
    return made


def compositions() -> Finding:
    lines = [(text, size) for size, texts in COMPOSITIONS.items() for text in texts.strip().splitlines()]
    return {text: attempted(lambda text=text, size=size: over_threads(parsed(text), size)) for text, size in lines}


# A round is in flight after step 7, but for the last two.
RESUMED = {
    "streaming_diloco(every=6, fragments=2, delay=3)": 2,
    "streaming_sign(every=6, fragments=2, delay=3)": 2,
    "eager_diloco(every=4, fragments=2)": 2,
    "choco(every=3, delay=2)": 4,
    "diloco(every=4)": 2,
    "dgc()": 2,
}


def resumed() -> Finding:
    """Runs that are saved after step 7, in files, and go on in new objects."""

    def of(text: str, replicas: int) -> Finding:
        strategy, folder = parsed(text), Path(tempfile.mkdtemp(dir="."))

        def first(group: tw.Group) -> int:
            replica, optimizer = replica_of(strategy, group)
            for step in range(1, 8):
                inner_step(replica.model, optimizer, group.rank, step)
            in_flight = len(replica.in_flight)
            checkpoint.save(folder / str(group.rank), replica, notes={})
            replica.close()
            return in_flight

        def second(group: tw.Group) -> str:
            attached, optimizer = replica_of(strategy, group)
            with attached as replica:
                found, _ = checkpoint.newest_common(folder / str(group.rank), group)
                assert found
                checkpoint.load(found, replica)
                for step in range(replica.step + 1, STEPS + 1):
                    inner_step(replica.model, optimizer, group.rank, step)
            return digest([*replica.model.parameters()])

        in_flight = tw.run_threads(replicas, first, timeout=LIMIT)
        return {
            "in flight": in_flight,
            "saved": saved(folder),
            "weights": tw.run_threads(replicas, second, timeout=LIMIT),
        }

    return {text: attempted(lambda text=text, size=size: of(text, size)) for text, size in RESUMED.items()}


def saved(folder: Path) -> Finding:
    """Digests of the newest checkpoint of each replica in `folder`."""
    found = {}
    for replica in sorted(path for path in folder.iterdir() if path.is_dir()):
        newest = max(path for path in replica.iterdir() if path.is_dir() and not path.name.startswith("."))
        found |= {
            f"{replica.name}, {newest.name}, {path.name}": digest(tensors_in(path))
            for path in sorted(newest.glob("*.safetensors"))
            if path.name != "inner.safetensors"  # it holds the process's random states, which no seed sets
        }
    return found


def tensors_in(path: Path) -> list[Tensor]:
    return by_name(load_file(path))


def solvers() -> Finding:
    import numpy as np

    codec = parsed("codec=RandomK(0.25, Identity())").codec

    def minmax(method: Any) -> list[str]:
        def replica(group: tw.Group) -> str:
            function = saddle(lambda x, y: (x * y * (1 + group.rank)).sum() + 0.1 * (x.square() - y.square()).sum(), 20)
            solver = Saddle(method, function, torch.linspace(-1, 1, 40), group)
            for _ in range(20):
                solver.iterate()
            return digest([solver.z])

        return tw.run_threads(2, replica, timeout=LIMIT)

    def dadao() -> str:
        gradients = [lambda x, own=own: (own + 1) * x - own for own in range(6)]
        found = Dadao(smooth=10, convex=1).minimise(gradients, np.zeros(5), 20)
        return digest([torch.from_numpy(found.x)])

    def coded(code: Any) -> list[Any]:
        heard = set(range(code.replicas - code.stragglers))
        return [digest([torch.tensor(sorted(one.items()))]) for one in (code.factors(1), code.weights(heard))]

    return {
        "minmax": {
            name: attempted(partial(minmax, method))
            for name, method in {
                "masha1": Masha1(step=0.05),
                "masha1, sparse": Masha1(step=0.05, codec=codec),
                "masha2": Masha2(step=0.05),
                "extragradient": Extragradient(step=0.05),
            }.items()
        },
        "dadao": attempted(dadao),
        "gradient codes": [attempted(partial(coded, code)) for code in (Cyclic(5, 2), Cyclic(6, 3), Repetition(6, 2))],
        "sequential codes": attempted(lambda: repr(Multiplexed(8, 1, 2, 3))),
    }


# ---- over processes


def together(calls: Mapping[str, Callable[[], Any]], at_once: int, may_die: Sequence[str] = ()) -> dict[str, Any]:
    """Run each call in its own process, so many at once. Returns what they returned, by name. Raises if one of them fails."""
    waiting, running, found = list(calls), dict[Any, tuple[str, Any]](), dict[str, Any]()
    try:
        while waiting or running:
            while waiting and len(running) < at_once:
                name = waiting.pop(0)
                here, there = FORK.Pipe(duplex=False)
                process = FORK.Process(target=_child, args=(calls[name], there), name=name)
                process.start()
                there.close()
                running[here] = name, process
            ready: list[Any] = wait([*running], LIMIT)
            if not ready:
                raise TimeoutError(f"{', '.join(name for name, _ in running.values())}: no result in {LIMIT:g} s")
            for pipe in ready:
                name, process = running.pop(pipe)
                try:
                    found[name], error = pipe.recv()
                except EOFError:
                    found[name], error = None, "" if name in may_die else f"{name} ended without a result"
                if error:
                    raise RuntimeError(f"{name}: {error}")
                process.join()
    finally:
        for _, process in running.values():
            process.terminate()
            process.join(5)
            process.kill()
    return {name: found[name] for name in calls}


def _child(call: Callable[[], Any], pipe: Any) -> None:
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_DFL)
    try:
        pipe.send((call(), ""))
    except BaseException:
        pipe.send((None, traceback.format_exc()))
    pipe.close()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # gloo's threads may wait for a group that is gone


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


WORLD = 4
FIXED = (
    "diloco(every=4)",
    "streaming_sign(every=4, delay=1)",
    "data_parallel()",
    "ef21(codec=TopK(0.1))",
    "noloco(every=4)",
)
HOOKED = ("data_parallel()", "ef21(codec=TopK(0.1))", "power_sgd(rank=1)")
SHARDED = ("diloco(every=4)", "streaming_diloco(every=6, fragments=2, delay=2)", "data_parallel()")


def processes() -> Finding:
    port = free_port()
    ranks = together({str(rank): partial(_rank, rank, port) for rank in range(WORLD)}, WORLD)
    return {name: {rank: found[name] for rank, found in ranks.items()} for name in ranks["0"]}


def _rank(rank: int, port: int) -> Finding:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    start_torch(rank, WORLD, "127.0.0.1", port, LIMIT)
    four, two = (tw.TorchGroup.from_world(replicas=size, timeout=LIMIT) for size in (WORLD, 2))
    found: Finding = {f"processes: {text}": trained(parsed(text), four) for text in FIXED}
    for text in SHARDED:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replica", "shard"))["shard"]
        model = Toy()
        for layer in model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        attached, optimizer = replica_of(parsed(text), two, model, site=two.site, validation=None)
        with attached as replica:
            for step in range(1, STEPS + 1):
                inner_step(model, optimizer, two.rank, step)
            exported = replica.export()
        local = [parameter.to_local() for parameter in model.parameters()]  # type: ignore[attr-defined]
        found[f"sharded: {text}"] = {"weights": digest(local), "export": digest(by_name(exported))}
    for text in HOOKED:
        ddp, strategy = nn.parallel.DistributedDataParallel(Toy(), bucket_cap_mb=1e-3), parsed(text)
        optimizer, hook = optimizer_of(strategy, ddp.module), tw.GradientHook(strategy, ddp.module, four)
        hook.register(ddp, optimizer)
        for step in range(1, STEPS + 1):
            inner_step(ddp, optimizer, rank, step)
        found[f"hook of DDP: {text}"] = {
            "weights": digest([*ddp.parameters()]),
            "state": digest(by_name(hook.state()[0])),
        }
        hook.close()
    torch.distributed.barrier()  # who leaves earlier must not close connections that others still read
    return found


def elastic() -> Finding:
    """Three members; one of them dies in its third period, and then another one comes. Each waits for each round, so the bits are determined."""
    with served("lighthouse --port 0 --heartbeat-timeout 1.5") as said:
        dead, address = Path("dead").absolute(), said["address"]
        members = {name: partial(_member, address, name, dead) for name in ("oslo", "lima", "rome", "bern")}
        return together(members, len(members), may_die=("rome",))


def _member(address: str, name: str, dead: Path) -> Finding:
    """One member. After rome's death at step 10 the others go on as two; at step 13 they wait for bern."""
    landed = threading.Semaphore(0)
    rounds: list[Any] = []

    def observer(event: str, step: int, **fields: Any) -> None:
        if event == "round" and fields.get("committed"):
            rounds.append(step)
            landed.release()

    if name == "bern":
        until(lambda: (dead.parent / "bern").exists())
    times = Timeouts(
        heartbeat_interval=0.3, heartbeat_timeout=1.5, grace=60.0, connect=60.0, transfer=60.0, vote=60.0, view=LIMIT
    )
    membership = Membership(LighthouseRendezvous(address), name, least=3, timeouts=times)
    strategy, place = parsed("diloco(every=4)"), sorted(("oslo", "lima", "rome", "bern")).index(name)
    attached, optimizer = replica_of(strategy, membership, observer=observer, validation=None)
    with attached as replica:
        while replica.step < 20:
            inner_step(replica.model, optimizer, place, replica.step + 1)
            if replica.step % 4 == 0:
                landed.acquire(timeout=LIMIT)
            if replica.step == 10 and name == "rome":
                dead.touch()
                os._exit(9)
            if replica.step == 10:
                until(dead.exists)
                membership.least = 2
            if replica.step == 13 and name in ("oslo", "lima"):
                membership.least = 3
                (dead.parent / "bern").touch()
    return {
        "weights": digest([*replica.model.parameters()]),
        "anchors": digest(replica.anchors()),
        "rounds": len(rounds),
    }


def until(there: Callable[[], bool]) -> None:
    end = time.monotonic() + LIMIT
    while not there():
        if time.monotonic() > end:
            raise TimeoutError(f"not there in {LIMIT:g} s")
        time.sleep(0.02)


# ---- the command


def command(words: str, code: int = 0) -> str:
    """Run one `thinwire` command in its own process. Returns what it printed; raises if its exit code is another."""
    out = Path(tempfile.mkdtemp(dir=".")) / "stdout"
    process = FORK.Process(target=_command, args=(words, out))
    process.start()
    process.join(LIMIT)
    if process.is_alive():
        process.terminate()
        process.join()
        raise TimeoutError(f"thinwire {words} took more than {LIMIT:g} s")
    wrong = out.with_name("stderr").read_text()
    if process.exitcode != code:
        raise RuntimeError(f"thinwire {words} ended with {process.exitcode}: {wrong[-2000:]}")
    return out.read_text() if code == 0 else wrong


def _command(words: str, out: Path) -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    for path, stream in ((out, 1), (out.with_name("stderr"), 2)):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT), stream)
    sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w", buffering=1)
    sys.argv = ["thinwire", *words.split()]
    code: object = 0
    try:
        runpy.run_module("thinwire", run_name="__main__", alter_sys=True)
    except SystemExit as ended:
        code = ended.code
    except BaseException:
        traceback.print_exc()
        code = 70
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code if isinstance(code, int) else 0)


@contextmanager
def served(words: str) -> Iterator[Finding]:
    """A server of the command, at work: what it printed as JSON."""
    out = Path(tempfile.mkdtemp(dir=".")) / "stdout"
    process = FORK.Process(target=_command, args=(f"{words} --json", out))
    process.start()
    try:
        until(lambda: not process.is_alive() or (out.exists() and out.read_text().rstrip().endswith("}")))
        if not process.is_alive():
            raise RuntimeError(f"thinwire {words}: {out.with_name('stderr').read_text()[-2000:]}")
        yield object_in(out.read_text())
    finally:
        process.terminate()
        process.join(10)
        process.kill()


def object_in(printed: str) -> Finding:
    """The JSON object at the end of what was printed."""
    found: Finding = json.loads(printed[printed.index("{") :])
    return found


JOB = """
import torch
from torch import nn


def model():
    return nn.Sequential(nn.Linear(7, 31), nn.Tanh(), nn.Linear(31, 31), nn.Tanh(), nn.Linear(31, 3))


def batches(share):
    generator = torch.Generator().manual_seed(1000 + share.index)
    while True:
        x = torch.randn(8, 7, generator=generator)
        yield x, x[:, :3].sin()


def loss(model, batch):
    return nn.functional.mse_loss(model(batch[0]), batch[1])
"""
TEXT = "".join(f"line {i}: {i * i % 97} thin wires carry {i % 13} packets\n" for i in range(400))
A_JOB = "train --job job.py --out run --steps 12 --checkpoint-every 5"
A_TEXT = "--model nano --text text.txt --batch 2 --sequence 16 --eval-batches 1"

# Options of `thinwire train` without spaces in them, each a part of its own.
TRAINED = {
    **{
        f"train {words.split()[0]}": f"{A_JOB} --carrier threads --strategy {words}"
        for words in (
            # methods with their own loops, which are reached by name only here; time is virtual where speeds are unequal
            "just_one_byte(samples=2,radius=0.01)",
            "fedavg(every=3)",
            "fedavg(every=2,sampled=1,codec=Cast('bf16')) --replicas 3",
            "scaffold(every=3,outer_lr=0.7)",
            "scallion(every=3,codec=RandomK(0.5,Int(8,32,'fp32','stochastic')))",
            "scafcom(every=3,codec=TopK(0.3))",
            "flasc(every=3,up=0.4,down=1.0,outer_lr=0.05)",
            "decoupled_diloco(every=3,quorum=2,slow=(1,2,3)) --replicas 3",
            "decoupled_diloco(every=4,slow=(1,2),delay=1,outer_momentum=0.5)",
            "async_local_sgd(every=3,slow=(1,2,4)) --replicas 3",
            "halos(every=2,apart=2,slow=(1,1,2,2)) --replicas 4",
            "ad_psgd(every=2,slow=(1,2,1,1),topology=Ring()) --replicas 4",
            "a2cid2(every=2,slow=(1,2,1,1),codec=E3M0(32)) --replicas 4",
            "plexus(every=3,sample=2) --replicas 3",
            # compositions, as the command reads them
            "streaming_sign --every 4 --delay 1",
            "d_psgd --every 2 --replicas 4 --topology ring",
            "diloco --every 4 --publish",
        )
    },
    "train on text": f"train --out run --steps 8 --every 4 --delay 1 --carrier threads {A_TEXT}",
    "train codistill": "train --out run --steps 12 --carrier threads --models nano nano --text text.txt --batch 2 --sequence 16 "
    "--eval-batches 1 --strategy codistill(every=4,delay=2,probe=16,warmup=4)",
    "train over processes": f"{A_JOB} --strategy streaming_diloco --every 6 --delay 2",
    "train at a hub": f"{A_JOB} --carrier secure --strategy streaming_sign --every 4 --delay 1",
    "train at a hub that averages": f"{A_JOB} --carrier secure --strategy Strategy(schedule=Every(4),exchange=Star())",
}  # fmt: skip


def files() -> None:
    Path("job.py").write_text(JOB)
    Path("text.txt").write_text(TEXT)


def train(words: str) -> Finding:
    """Train with the command."""
    files()
    command(words)
    return left_by(Path("run"))


def left_by(run: Path) -> Finding:
    """Digests of a run's models and of its newest checkpoints."""
    models = {str(path.relative_to(run)): digest(tensors_in(path)) for path in sorted(run.glob("model*.safetensors"))}
    return models | saved(run / "checkpoints")


def train_resumed() -> Finding:
    """A run of the command that goes on to more steps."""
    files()
    settings = "--carrier threads --strategy streaming_diloco --every 6 --delay 3 --checkpoint-every 8"
    command(f"train --job job.py --out run --steps 8 {settings}")
    command("resume run --steps 14")
    return left_by(Path("run"))


# ---- pieces, verbs, options, keys of --json

OF_PIECES = (
    "strategy",
    "codec",
    "partition",
    "exchange",
    "topology",
    "aggregate",
    "guard",
    "privacy",
    "optimizer",
    "attack",
)


def pieces() -> Finding:
    """The names of all pieces, and what the command offers where one is needed."""
    offered = {}
    for option in OF_PIECES:
        before = "--strategy d_psgd " if option == "topology" else ""
        said = command(f"train {before}--{option} nonesuch", code=2)
        offered[option] = there(name for name in {*PIECES, *RECIPES} if re.search(rf"\b{name}\b", said))
    return {
        "names of thinwire": there(tw.__all__),
        "pieces": {name: _printed(piece) for name, piece in PIECES.items()},
        "offered": offered,
    }


def _printed(piece: Callable[..., Any]) -> str:
    """A piece with its defaults; without them, its arguments."""
    try:
        return repr(piece())
    except (TypeError, tw.ConfigurationError):
        return f"{piece.__name__}{inspect.signature(piece)}"


def options_in(helped: str) -> dict[str, str]:
    """The arguments that a help shows, and what it says of each."""
    found, last = dict[str, str](), ""
    for line in (each.strip("│\n")[1:].rstrip() for each in helped.splitlines() if each.startswith("│")):
        if line.startswith(("-", "[")) or re.match(r"[A-Z_]+(  |$)", line):
            last, _, text = line.partition("  ")
            found[last] = text
        elif last:
            found[last] += " " + line
    return {name: " ".join(text.split()) for name, text in found.items()}


def verbs() -> Finding:
    """Each verb, and each study below one, with its options and their defaults."""
    found: Finding = {}
    for verb in re.findall(r"^  ([a-z]+)  ", command("--help"), re.M):
        helped = command(f"{verb} --help")
        below = re.findall(r"^  ([a-z]+)  ", helped, re.M) if "STUDY" in helped else []
        below += sorted(set(re.findall(rf"`thinwire {verb} ([a-z]+)`", " ".join(helped.split()))))
        found |= {verb: helped} | {f"{verb} {study}": command(f"{verb} {study} --help") for study in below}
    return {verb: {name: _default(text) for name, text in options_in(helped).items()} for verb, helped in found.items()}


def _default(text: str) -> str:
    default = re.search(r"\((default: .*?|required)\)$", text)
    return default[1] if default else ""


def keys(value: Any, path: str = "") -> set[str]:
    """The paths of all keys in a JSON value; elements of lists, and keys that are numbers, are alike."""
    if isinstance(value, dict):
        inner = [keys(item, f"{path}.{'*' if key.isdigit() else key}") for key, item in value.items()]
    elif isinstance(value, list):
        inner = [keys(item, f"{path}[]") for item in value]
    else:
        inner = []
    return {path, *(each for some in inner for each in some)}


def there(names: Iterable[str]) -> dict[str, str]:
    """Names as a finding, so that a comparison says which of them is missing or new."""
    return dict.fromkeys(sorted(names), "there")


def keys_of(words: str) -> dict[str, str]:
    return there(keys(object_in(command(f"{words} --json"))))


def all_keys(*commands: str) -> Finding:
    """The keys that each of these commands prints, one after another in one folder."""
    files()
    return {words: attempted(partial(keys_of, words)) for words in commands}


def keys_of_runs() -> Finding:
    return all_keys(
        f"train --out run --steps 8 --every 4 --delay 1 --checkpoint-every 4 --carrier threads --publish {A_TEXT}",
        "resume run --steps 10",
        "report run",
        "top run",
        "checkpoints run --verify",
        "sample run thin --tokens 5",
        "follow run --once --out live",
        "export run --to safetensors",
        "evaluate run --eval-batches 1",
        "branch run --domain wires --out experts --steps 2 --carrier threads --text text.txt",
        "evaluate experts --text text.txt --eval-batches 1",
    )


def keys_of_jobs() -> Finding:
    job = "--job job.py --carrier threads --steps 8 --every 4"
    return all_keys(
        "new template.py",
        f"train {job} --out run",
        "report run",
        f"compare {job} --strategies diloco local_sgd --out compared",
        "docs",
        "docs start",
    )


def keys_of_studies() -> Finding:
    Path("lengths.txt").write_text("".join(f"{100 + 37 * i % 900}\n" for i in range(40)))
    rows = [(n, m, 3.0 * n**-0.1 * m**0.01) for n in (1e6, 4e6, 1.6e7, 6.4e7) for m in (1, 2, 4)]
    Path("ladder.csv").write_text("parameters,replicas,loss\n" + "".join(f"{n:g},{m},{x:.6f}\n" for n, m, x in rows))
    return all_keys(
        "simulate utilization",
        "simulate run --model nano --steps 40 --every 10 --step-seconds 0.1 --link 10mbit,30ms --text text.txt",
        "simulate pipeline",
        "simulate fabric",
        "simulate overlap",
        "simulate stragglers --replicas 6 --steps 20 --probe 10",
        "simulate disrupted --replicas 12 --graphs 2 --runs 1 --rounds 6 --at-round 2",
        "simulate sampled --peers 10 --sample 3 --rounds 5",
        "plan fit ladder.csv --draws 20",
        "plan pack lengths.txt",
        "plan tp 1b --ranks 2",
        "plan topology --replicas 6 --model nano --links 50mbit,30ms",
    )


def keys_of_machines() -> Finding:
    """Measuring and planning."""
    return all_keys(
        "probe --model nano --sequence 16 --link 50mbit,5ms --seconds 0.02 --trips 3",
        "plan 50mbit,30ms machine.toml --model nano --text text.txt",
    )


def hub() -> Finding:
    """A hub and its two members, and a lighthouse: keys, and the members' models."""
    files()
    settings = '[method]\nstrategy = "streaming_sign"\nevery = 4\ndelay = 1\n[optimizer]\nsteps = 10\n'
    Path("run.toml").write_text(f'{settings}[model]\njob = "{Path("job.py").absolute()}"\n')
    found: Finding = {}
    with served("lighthouse --port 0") as said:
        found["lighthouse"] = there(keys(said))
    with served(f"hub --out hub --listen 127.0.0.1:{free_port()} --uses 2") as said:
        found["hub"] = there(keys(said))

        def member(name: str) -> dict[str, str]:
            return keys_of(f"join {said['token']} run.toml --name {name} --out {name} --keys keys --trust")

        found["join"] = together({name: partial(member, name) for name in ("oslo", "lima")}, 2)
        found |= {words: keys_of(f"hub {words} --out hub") for words in ("list", "invite", "revoke lima")}
    return found | {f"left by {name}": left_by(Path(name)) for name in ("oslo", "lima")}


# ---- the parts together

PARTS: dict[str, Callable[[], Finding]] = {
    "elastic": elastic,
    "hub": hub,
    "processes": processes,
    **{name: partial(train, words) for name, words in reversed(TRAINED.items())},
    "train and resume": train_resumed,
    "keys of machines": keys_of_machines,
    "keys of runs": keys_of_runs,
    "keys of jobs": keys_of_jobs,
    "keys of studies": keys_of_studies,
    "recipes": recipes,
    "compositions": compositions,
    "resumed": resumed,
    "solvers": solvers,
    "pieces": pieces,
    "verbs": verbs,
}


def findings(only: Sequence[str], jobs: int) -> Finding:
    """What each part finds, in a process and a folder of its own."""

    def part(name: str, folder: Path) -> Any:
        folder.mkdir()
        os.chdir(folder)
        os.environ["HOME"] = str(folder)  # what this user has trusted and downloaded stays out of it
        began = time.monotonic()
        found = attempted(PARTS[name])
        print(f"{time.monotonic() - began:5.1f} s  {name}", file=sys.stderr, flush=True)
        return found

    over_threads(tw.diloco(every=4), 2)  # loads compiled loops and modules, which all processes then have
    chosen = [name for name in PARTS if not only or name.startswith(tuple(only))]
    with tempfile.TemporaryDirectory() as folder:
        calls = {name: partial(part, name, Path(folder) / str(number)) for number, name in enumerate(chosen)}
        return together(calls, jobs)


def flat(value: Any, path: str = "") -> dict[str, str]:
    """Every value of a finding by its path."""
    if isinstance(value, dict):
        inner = [flat(item, f"{path} › {key}" if path else str(key)) for key, item in value.items()]
    elif isinstance(value, list):
        inner = [flat(item, f"{path} › {number}") for number, item in enumerate(value)]
    else:
        return {path: str(value)}
    return {key: leaf for some in inner for key, leaf in some.items()}


def differences(recorded: Finding, now: Finding) -> list[tuple[str, str, str]]:
    """Path, recorded value and present value of every leaf that differs."""
    before, after = flat(recorded), flat(now)
    paths = [*before, *(path for path in after if path not in before)]
    return [
        (path, before.get(path, "not there"), after.get(path, "not there"))
        for path in paths
        if before.get(path) != after.get(path)
    ]


def errors_in(found: Finding) -> dict[str, str]:
    return {path: text for path, text in flat(found).items() if path.endswith("› error")}


def table(rows: Sequence[tuple[str, str, str]]) -> str:
    lines = []
    for path, before, after in rows:
        lines += [path, f"    recorded  {before}", f"    now       {after}"]
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("verb", choices=("record", "compare"))
    parser.add_argument("file", type=Path, help="the recording, a JSON file")
    parser.add_argument(
        "--only", nargs="+", default=[], metavar="WORD", help="parts whose names begin with one of these"
    )
    parser.add_argument("--jobs", type=int, default=2, help="parts that run at once")
    asked = parser.parse_args()
    # `record` of some parts leaves the others in the file as they are
    recording = (
        json.loads(asked.file.read_text()) if asked.verb == "compare" or (asked.only and asked.file.exists()) else {}
    )
    only = asked.only or [name for name in recording.get("findings", ()) if name in PARTS]
    file, about = asked.file.absolute(), provenance()
    torch.set_num_threads(1)
    found = json.loads(json.dumps(findings(only, asked.jobs)))
    if asked.verb == "record":
        file.write_text(
            json.dumps(about | {"findings": recording.get("findings", {}) | found}, indent=1, ensure_ascii=False) + "\n"
        )
        failed = errors_in(found)
        print("".join(f"{path}: {text}\n" for path, text in failed.items()), end="")
        print(f"{len(flat(found))} values of {len(found)} parts recorded in {file}; {len(failed)} errors")
        return 1 if failed else 0
    for name in ("machine", "versions"):
        then, today = (
            {k: v for k, v in each[name].items() if k not in ("load", "kernel", "thinwire")}
            for each in (recording, about)
        )
        if then != today:
            print(f"another {name}, so digests may differ for that alone: {then} recorded, {today} here")
    before = {name: part for name, part in recording["findings"].items() if not asked.only or name in found}
    missing = [name for name in PARTS if name not in recording["findings"]]
    if missing and not asked.only:
        print(f"not recorded, so not compared: {', '.join(missing)}")
    rows = differences(before, found)
    print(table(rows))
    print(f"{len(rows)} of {len(flat(before))} values differ from {file} (commit {recording['commit']})")
    return 1 if rows else 0


if __name__ == "__main__":
    sys.exit(main())
