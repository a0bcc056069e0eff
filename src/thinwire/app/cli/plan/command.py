"""`thinwire plan`: ranks settings for measured links and machines, with reasons. Packages add further commands as verbs "plan.NAME"."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tyro
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from thinwire.app.cli import figures, options
from thinwire.app.cli.verbs import verbs
from thinwire.app.plan import exchanges, explain
from thinwire.app.plan.compute import shape_of
from thinwire.app.plan.figure import frontier_chart, rates_chart
from thinwire.app.plan.links import Links, store
from thinwire.app.plan.machine import Machine
from thinwire.app.plan.scaling import TOKENS_PER_PARAMETER
from thinwire.app.plan.search import settings
from thinwire.app.plan.setting import SEARCHED, Setting, Task
from thinwire.app.plan.sharding import Shards, traffic
from thinwire.app.plan.targets import Targets, meeting
from thinwire.app.records.printable import printable, quoted
from thinwire.app.records.units import (
    NOTHING,
    text_of_count,
    text_of_nbytes,
    text_of_rate,
    text_of_seconds,
    text_of_share,
)
from thinwire.app.report.charts import Chart
from thinwire.app.report.terminal import waiting
from thinwire.app.trainer.model import text_of_size
from thinwire.app.trainer.run import Run
from thinwire.choices import nearest
from thinwire.comm import Link, quantities
from thinwire.errors import ConfigurationError
from thinwire.files import check_place
from thinwire.membership.channel import LIGHTHOUSE_PORT
from thinwire.net.token import HUB_PORT
from thinwire.registered import VERBS, absent


@dataclass(frozen=True)
class Options:
    """The options of `thinwire plan`."""

    links: tyro.conf.Positional[str]
    """links.toml (from `thinwire probe`, or written by hand), or one link for all, such as 50mbit,30ms."""
    machines: tyro.conf.Positional[tuple[Path, ...]]
    """machine.toml: one for all replicas, or one for each in the order of the links' names."""
    replicas: int | None = None
    """Number of replicas, if LINKS is one link for all. Default: 2."""
    run: Path | None = None
    """A run file with the model, the text and all other settings that a plan does not choose. Default: the defaults of `thinwire train`."""
    model: str | None = None
    """The model. Default: the run file's."""
    job: str | None = None
    """A job file of your own; then tokens are its samples, or its batches if it collates none. Default: the run file's."""
    sequence: int | None = None
    """Tokens per sequence. Default: the run file's."""
    text: tuple[str, ...] | None = None
    """Files and folders of text. Default: the run file's."""
    tokenizer: str | None = None
    """bytes or bpe:SIZE. Default: the run file's."""
    tokens: str | None = None
    """Tokens to train on, such as 20B. Default: 20 per parameter; for a job, the run file's number."""
    batch_tokens: str | None = None
    """Tokens of an inner step, all replicas together, such as 1M. Default: the scaling law's, if it holds."""
    memory: str | None = None
    """Memory that a rank may use, such as 16GB. Default: 90 % of machine.toml's."""
    utilization: float | None = None
    """Least share of the time in training, such as 0.95. Default: any."""
    deadline: str | None = None
    """Most time for all tokens, such as 3d or 12h. Default: any."""
    loss: float | None = None
    """Largest expected evaluation loss, in nats per token of C4, the text of the laws. Default: any."""
    methods: tuple[str, ...] = SEARCHED
    """Methods to try."""
    ranks: int = 1
    """Ranks of a site that form one replica, sharded by FSDP2."""
    degrees: str | None = None
    """With --ranks: nested degrees s_w,s_g,s_o of weights, gradients and moments to compare with, such as 2,8,8. Default: none are compared."""
    levels: tuple[int, ...] = ()
    """With --ranks: number of ranks that each faster level joins, such as 2 for pairs; the last level joins all."""
    top: int = 8
    """Rows in the table: the best of each method, then the best for each method, number of replicas and H."""
    out: Path = Path("plan.toml")
    """The run file of the best setting."""
    frontier: Path | None = None
    """Draw expected loss against bytes for all settings: FILE.svg, FILE.html, or FILE.png (which needs thinwire[png]). Default: no picture."""
    rates: Path | None = None
    """Draw training's share of the time against the rate of the links, one curve per row: FILE.svg, .html or .png. Default: no picture."""
    trust: bool = False
    """Run the code that the run file names, with which you have not trained on this machine before. Read it first."""
    json: bool = False
    """Tables go to stderr; stdout ends with one JSON object."""


def main(arguments: Sequence[str]) -> int:
    beside = {name.partition(".")[2]: verb for name, verb in verbs().items() if name.startswith("plan.")}
    if arguments and arguments[0] in beside:
        return int(beside[arguments[0]].load().main(list(arguments[1:])))
    if arguments and arguments[0].isidentifier() and not Path(arguments[0]).exists():
        raise ConfigurationError(
            f"{arguments[0]!r} is neither links nor one of {', '.join(beside) or 'no commands'}{nearest(arguments[0], beside)}; give "
            f"links.toml, or one link such as 50mbit,30ms.{absent(VERBS)}"
        )
    further = "; ".join(f"`thinwire plan {name}`: {verb.about}" for name, verb in beside.items())
    about = f"Rank settings for given links and machines (predicted), and write the best one's run file. Further commands: {further}."
    asked = options.read(Options, "plan", arguments, about)
    if asked.top < 1:
        raise ConfigurationError(f"top={asked.top}: at least 1 row is needed.")
    given = [f"--{name}" for name in ("degrees", "levels") if getattr(asked, name) not in (None, ())]
    if asked.ranks == 1 and given:
        raise ConfigurationError(
            f"{' and '.join(given)} with --ranks 1: more ranks are needed, among which weights and traffic are divided; give --ranks, above 1, too."
        )
    for figure in (asked.frontier, asked.rates):
        figures.check(figure)
    if asked.frontier is not None and asked.frontier == asked.rates:
        raise ConfigurationError(f"--frontier and --rates {asked.rates}: one file holds one picture; give two names.")
    check_place(asked.out)
    degrees, levels = _degrees_and_levels(asked)
    console, task = options.console(asked.json), _task(asked)
    if task.base.model.job and (asked.loss is not None or asked.frontier):
        aim = "--frontier" if asked.loss is None else f"--loss {asked.loss:g}"
        raise ConfigurationError(f"{aim} with the job {task.base.model.job}: {explain.NO_LOSS}; leave it out.")
    deadline = quantities.seconds(asked.deadline) if asked.deadline is not None else None
    targets = Targets(asked.utilization, deadline, asked.loss)
    with waiting(console, "pricing settings"):
        found = settings(task)
    met = meeting(found, targets, task)
    rows, best = _rows(met, asked.top), met[0]
    console.print(_table(rows, task))
    for number, setting in enumerate(rows, 1):
        console.print(
            f"{number}. {setting.run.method.label}, {_who(setting, task)} (predicted): {explain.sentence(setting, best)}",
            highlight=False,
        )
    if task.ranks > 1:
        console.print(_sharding_table(task, best, degrees, levels))
    _aside(console, task, best)
    drawn: list[tuple[Path | None, Callable[[], Chart]]] = [
        (asked.frontier, lambda: frontier_chart(met, best)),
        (asked.rates, lambda: rates_chart(rows, task)),
    ]
    for path, chart in drawn:
        if path:
            title = f"{task.base.model.label}, up to {len(task.links)} replicas"
            figures.draw(chart(), title, path, "predicted", options.teller(console))
    _write(asked.out, best, task)
    console.print(f"written: {asked.out}\nto train: {_command(asked.out, best, task)}", soft_wrap=True, highlight=False)
    return options.answer(asked.json, _facts(rows, best, task, asked.out) if asked.json else {})


def _task(asked: Options) -> Task:
    run = Run.load(asked.run) if asked.run else Run()
    changes = {name: getattr(asked, name) for name in ("model", "job", "sequence", "text", "tokenizer")}
    changes = {name: value for name, value in changes.items() if value is not None}
    run = run.changed(**changes, slow=()).counted_in_samples()  # MACHINES say how fast each one is
    if asked.ranks > 1 and run.placement.carrier not in ("processes", "threads"):
        raise ConfigurationError(
            f"--ranks {asked.ranks} with carrier={run.placement.carrier!r}: torchrun starts replicas of several ranks, as a fixed group; "
            'write carrier = "processes" in the run file, or leave --ranks out.'
        )
    if asked.links.endswith(".toml") or Path(asked.links).exists():
        links = Links.load(Path(asked.links))
        if asked.replicas not in (None, len(links)):
            raise ConfigurationError(f"--replicas {asked.replicas}: {asked.links} has {len(links)}; leave it out.")
    else:
        replicas = 2 if asked.replicas is None else asked.replicas
        if replicas < 1:
            raise ConfigurationError(f"--replicas {replicas}: at least 1 is needed.")
        links = Links.uniform(Link.parse(asked.links), replicas)
    if not asked.machines:
        raise ConfigurationError(
            "no machine was given; `thinwire probe` writes machine.toml: thinwire plan LINKS machine.toml"
        )
    tokens = quantities.count(asked.tokens) if asked.tokens is not None else _enough(run)
    return Task(
        base=run, links=links, machines=tuple(Machine.load(path) for path in asked.machines), tokens=tokens, ranks=asked.ranks,
        batch_tokens=quantities.count(asked.batch_tokens) if asked.batch_tokens is not None else None,
        memory_nbytes=quantities.nbytes(asked.memory) if asked.memory is not None else None,
        methods=tuple(method.replace("-", "_") for method in asked.methods),
    )  # fmt: skip


def _enough(run: Run) -> float:
    """The tokens of the scaling laws; for a job those of the run."""
    if run.model.job:
        return float(run.optimizer.steps * run.data.tokens * run.placement.replicas)
    return TOKENS_PER_PARAMETER * shape_of(run).parameters()


def _rows(found: Sequence[Setting], top: int) -> list[Setting]:
    """The best of each method, then the best of each method, number of replicas and H; in their order."""
    methods: dict[str, Setting] = {}
    distinct: dict[tuple[str, int, int | None], Setting] = {}
    for setting in found:
        methods.setdefault(setting.method, setting)
        distinct.setdefault((setting.method, setting.replicas, setting.candidate.run.method.every), setting)
    chosen = list(dict.fromkeys([id(s) for s in (*methods.values(), *distinct.values())]))[: max(top, 1)]
    return [setting for setting in found if id(setting) in chosen]


def _table(rows: Sequence[Setting], task: Task) -> Table:
    shape = shape_of(task.base)
    named = text_of_size(task.base.model.model, shape.parameters())
    title = (
        f"{task.base.model.label}, {text_of_count(shape.parameters())} parameters{f' ({named})' * bool(named)}, {text_of_count(task.tokens)} tokens, "
        f"up to {len(task.links)} replicas on links that were {task.links.word} (predicted)"
    )
    table = Table(title=title, box=SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    table.add_column("", no_wrap=True, min_width=1)
    table.add_column("method", no_wrap=True)
    for head in ("M", "H", "τ", "batch", "training", "tokens/s", "useful", "sent, each", "memory", "loss", "takes"):
        table.add_column(head, justify="right", no_wrap=True)
    for number, setting in enumerate(rows, 1):
        run, schedule = setting.run, setting.run.make_strategy().schedule
        table.add_row(
            str(number), run.method.strategy, str(run.placement.replicas), str(schedule.every), str(schedule.delay),
            f"{run.data.batch}×{run.data.accumulate}",
            text_of_share(setting.pace.utilization), text_of_count(setting.tokens_per_second),
            text_of_count(setting.useful_tokens_per_second), text_of_rate(setting.bits_per_second),
            text_of_nbytes(setting.memory_nbytes), _loss(setting), text_of_seconds(setting.seconds),
        )  # fmt: skip
    losses = f"loss: {explain.NO_LOSS}" if task.base.model.job else "(loss): outside the laws"
    table.caption = (
        f"batch: sequences × micro-batches of a replica · useful: in tokens of data-parallel training · {losses}"
    )
    return table


def _loss(setting: Setting) -> str:
    """A prediction as text, in parentheses if it is outside of the fitted range. The laws are of language models alone."""
    if setting.run.model.job:
        return NOTHING
    return f"({setting.loss.value:.3f})" if setting.loss.warnings else f"{setting.loss.value:.3f}"


def _aside(console: Console, task: Task, best: Setting) -> None:
    """The exchange, refusals and warnings."""
    if told := exchanges.sentence(best, task.links):
        console.print(told, highlight=False)
    for refusal in explain.refused(task, best):
        verdict = "refused" if refusal.utilization < explain.USELESS_UTILIZATION else "not tried"
        console.print(
            f"{verdict}: {refusal.what}: {refusal.because}: {text_of_share(refusal.utilization)} of the time would be training (predicted)",
            highlight=False,
        )
    for warning in explain.warnings(task, best):
        console.print(f"warning: {warning}", highlight=False)


def _degrees_and_levels(asked: Options) -> tuple[Shards | None, Sequence[int]]:
    """The degrees, and the levels with the last one. Raises `ConfigurationError` if they do not fit the ranks."""
    levels = asked.levels if asked.levels and asked.levels[-1] == asked.ranks else (*asked.levels, asked.ranks)
    degrees = Shards.parse(asked.degrees) if asked.degrees is not None else None
    if asked.ranks > 1:
        traffic(degrees or Shards(), 1, asked.ranks, levels)
    return degrees, levels


def _sharding_table(task: Task, best: Setting, degrees: Shards | None, levels: Sequence[int]) -> Table:
    """The bytes that a rank keeps and sends inside its site, for the named ways of sharding and for the given one."""
    table = Table(
        "s_w, s_g, s_o", title=f"Sharding over {task.ranks} ranks of a site (predicted; `thinwire train` takes ZeRO-3)"
    )
    table.add_column("")
    table.add_column("a rank keeps", justify="right")
    for level in levels:
        table.add_column(f"sent a step among {level}", justify="right")
    for way, kept, sent in explain.shards(task, best, degrees, levels):
        cells = (text_of_nbytes(nbytes) for nbytes in sent)
        table.add_row(f"{way.weights}, {way.gradients}, {way.optimizer}", way.name, text_of_nbytes(kept), *cells)
    table.caption = "kept: weights, gradients and moments; sent: inside the site, per inner step"
    return table


def _who(setting: Setting, task: Task) -> str:
    if len(setting.places) == len(task.links):
        return f"all {len(task.links)}" if len(task.links) > 1 else "alone"
    return explain.few([task.links.names[place] for place in setting.places])


def _write(path: Path, best: Setting, task: Task) -> None:
    """The run file, with the predictions as a comment at its top."""
    run = best.run
    if task.links.word == "emulated" and len(best.places) > 1:
        slowest = min(task.links.among(best.places).alone.values(), key=lambda link: link.bits_per_second)
        run = run.changed(link=str(slowest))
    path.parent.mkdir(parents=True, exist_ok=True)
    run.save(path)
    names = ", ".join(f"{rank} = {task.links.names[place]}" for rank, place in enumerate(best.places))
    comment = [
        f"Written by `thinwire plan`. Replicas: {names}.",
        f"Predicted: {text_of_share(best.pace.utilization)} of the time in training, {text_of_count(best.tokens_per_second)} tokens/s, "
        f"{text_of_nbytes(best.memory_nbytes)} a rank, {text_of_seconds(best.seconds)} in all.",
        *explain.warnings(task, best),
    ]
    store(path, "".join(f"# {printable(line)}\n" for line in comment) + path.read_text())


def _command(path: Path, best: Setting, task: Task) -> str:
    replicas, carrier, file = best.run.placement.replicas, best.run.placement.carrier, quoted(path)
    here = best.run.placement.link != "none" or task.links.word == "emulated"
    if task.ranks == 1 and (here or replicas == 1):
        return f"thinwire train {file}"
    if carrier == "elastic":
        return (
            "thinwire lighthouse --host HOST --secret run.secret, and on each machine: thinwire train "
            f"{file} --lighthouse HOST:{LIGHTHOUSE_PORT} --secret run.secret --name NAME --out runs/planned"
        )
    if carrier in ("secure", "secure-elastic"):
        kind = " --elastic" if carrier == "secure-elastic" else ""
        return (
            f"thinwire hub{kind} --listen 0.0.0.0:{HUB_PORT} --address HOST --uses {replicas}, and on each machine: "
            f"thinwire join TOKEN {file} --name NAME"
        )
    ranks = "" if task.ranks == 1 else f" --nproc_per_node {task.ranks}"
    where = f" --nnodes {replicas} --node_rank RANK{ranks} --master-addr HOST"
    if here or replicas == 1:
        where = f" --standalone --nproc_per_node {replicas * task.ranks}"
    return f"torchrun{where} -m thinwire train {file} --out runs/planned"


def _facts(rows: Sequence[Setting], best: Setting, task: Task, path: Path) -> dict[str, Any]:
    """The plan as JSON, for programs."""
    return {
        "word": "predicted",
        "links": task.links.word,
        "parameters": shape_of(task.base).parameters(),
        "tokens": task.tokens,
        "run_file": str(path),
        "settings": [
            {
                "strategy": setting.run.method.label, "composition": repr(setting.run.make_strategy()), 
                "replicas": setting.run.placement.replicas,
                "names": [task.links.names[place] for place in setting.places],
                "batch": setting.run.data.batch, "accumulate": setting.run.data.accumulate, 
                "lr": setting.run.lr, "steps": setting.run.optimizer.steps,
                "step_seconds": setting.step_seconds, "compute_utilization": setting.pace.utilization,
                "tokens_per_second": setting.tokens_per_second, "useful_tokens_per_second": setting.useful_tokens_per_second,
                "bits_per_second": setting.bits_per_second, "period_nbytes": setting.period_nbytes,
                "memory_nbytes": setting.memory_nbytes, "memory_limit_nbytes": setting.memory_limit,
                "loss": None if task.base.model.job else setting.loss.value, "density": setting.density, "seconds": setting.seconds,
                "reason": explain.sentence(setting, best),
            }
            for setting in rows
        ],
        "exchanges": [
            {"name": way.name, "exchange": repr(way.exchange) if way.exchange else None, "seconds": way.seconds}
            for way in exchanges.fitting(best, task.links)
        ],
        "refused": [dataclasses.asdict(refusal) for refusal in explain.refused(task, best)],
        "warnings": explain.warnings(task, best),
    }  # fmt: skip
