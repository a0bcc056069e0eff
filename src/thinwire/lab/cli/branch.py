"""`thinwire branch`: an expert for a domain, from a run's model, into an ensemble."""

from __future__ import annotations

import dataclasses
import math
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from rich.table import Table

from thinwire.app.cli import options
from thinwire.app.cli.capacity import check_capacity
from thinwire.app.cli.training import finish, train_to_the_end
from thinwire.app.records.run_record import RunRecord
from thinwire.app.records.units import text_of_share
from thinwire.app.trainer import launch
from thinwire.app.trainer.job import check
from thinwire.app.trainer.resuming import complete
from thinwire.app.trainer.run import Run
from thinwire.app.trainer.run_folder import check_links
from thinwire.app.trainer.settings import DataSpec
from thinwire.app.trainer.tokenizer import make_tokenizer
from thinwire.errors import ConfigurationError
from thinwire.lab.experts.ensemble import DOMAIN, Ensemble, enter, flops_per_token, model_in, sha256_of, sound_model
from thinwire.lab.methods import Codistill

LR_SHARE = 0.1  # an expert's share of the run's learning rate; the paper's seed has 6e-4, its experts 6e-5


@dataclass(frozen=True)
class Options:
    """The options of `thinwire branch`, beside every option of a run."""

    MOST_USED: ClassVar[tuple[str, ...]] = ("domain", "out", "flops")

    run_settings: Run
    """The settings of the expert's training. Default: those of RUN, with a tenth of its learning rate."""
    run: Path | None = None
    """The folder of the finished run to branch from; it may be an expert's folder."""
    domain: str | None = None
    """Name of the domain, which is the name of the expert's folder: letters, digits, - and _."""
    out: Path = Path("experts")
    """The ensemble: a folder with a folder for each expert. Existing experts do not change."""
    flops: float | None = None
    """Train for this number of floating-point operations, instead of --steps: equal compute for unequal sizes. Default: --steps counts."""
    trained: bool = False
    """Take RUN's model as the expert without training: RUN was already trained on the domain."""
    trust: bool = False
    """Run the code that the run file names, with which you have not trained on this machine before. Read it first."""
    json: bool = False
    """Progress goes to stderr; stdout ends with one JSON object."""

    @staticmethod
    def base(arguments: Sequence[str]) -> Run:
        """The defaults: the settings of the run to branch from."""
        folder = Path(arguments[0]) if arguments and not arguments[0].startswith("-") else None
        if folder is None or not (folder / "run.toml").exists():
            return Run()
        seed = Run.load(folder / "run.toml")
        if seed.model.job:
            return seed
        model = model_in(folder) if (folder / "model.safetensors").exists() else seed.model.model
        lr = float(f"{LR_SHARE * seed.lr:.3g}")
        return seed.changed(model=model, lr=lr, text=(), own_text=False, tokenizer=None, publish=False)


DESCRIPTION = """Train an expert for a domain, from a run's model, into an ensemble (thinwire docs experts).

thinwire branch runs/seed --domain law --text law.txt --out experts

thinwire evaluate experts --text law.txt maths.txt"""


def main(arguments: Sequence[str]) -> int:
    asked = options.read(Options, "branch", arguments, DESCRIPTION)
    folder, source, console = _folder(asked), _source(asked), options.console(asked.json)
    if (folder / "expert.json").exists():
        raise ConfigurationError(f"{folder} is an expert already; choose another --domain or --out, or remove it.")
    stop = launch.Stop()
    options.warn_of_outcome(source)
    if asked.trained:
        _copy(source, folder)
        run, parent = Run.load(folder / "run.toml"), ""
    else:
        run, parent = _paid_for(asked).absolute(), sha256_of(source)
        check_capacity(run, check(run), run.placement.replicas, folder, console)
        with launch.stopping(stop):
            train_to_the_end(run, folder, console, stop)
            code = finish(folder, console, False, stop)
        whole = complete(run, folder)
        if code and whole:  # it ended without a model that can be used
            return code
        if not whole:
            console.print(
                "then repeat this command: the expert is entered when its training has ended", highlight=False
            )
            return code
    expert = enter(folder, run, RunRecord.load(folder).summary.tokens, parent)
    ensemble = Ensemble.read(asked.out)
    console.print(_table(ensemble))
    experts = [dataclasses.asdict(one) for one in ensemble.experts]
    return options.answer(asked.json, {"ensemble": str(asked.out), "domain": expert.domain, "experts": experts})


def _source(asked: Options) -> Path:
    """The folder to branch from, with a model in it."""
    if asked.run is None or not (asked.run / "run.toml").exists():
        raise ConfigurationError(
            f"{f'{asked.run} holds no run' if asked.run else 'no run was given'}: give the folder that `thinwire train` wrote first, as in thinwire "
            "branch RUN --domain law."
        )
    if asked.run_settings.model.job:
        raise ConfigurationError(
            f"{asked.run} has trained {asked.run_settings.model.label}: experts are language models; give a run on text."
        )
    model, given = model_in(asked.run), asked.run_settings.model.model
    if given != model:
        raise ConfigurationError(
            f"model={given!r} with {asked.run}: an expert begins with that run's model; leave --model out, or branch from another run."
        )
    if Ensemble.is_one(asked.out):
        there, here = Ensemble.read(asked.out).tokenizer.fingerprint, make_tokenizer(DataSpec(), model).fingerprint
        if there != here:
            raise ConfigurationError(
                f"{asked.run} has the tokenizer {here}, the experts in {asked.out} have {there}: one for all is needed; choose another --out."
            )
    if not asked.trained and not asked.run_settings.data.text:
        raise ConfigurationError(f"{asked.domain}: no text of the domain; add --text FILE, or --trained.")
    if asked.trained and asked.flops is not None:
        raise ConfigurationError("--flops with --trained: nothing is trained then; leave one of them out.")
    if asked.trained:
        RunRecord.load(asked.run)  # it tells the tokens; raises an error if it is no whole run
    elif isinstance(asked.run_settings.make_method(), Codistill):
        raise ConfigurationError(
            f"{asked.run_settings.method.label} gives each replica a model of its own, and an expert is one; give another --strategy."
        )
    sound_model(asked.run, asked.run_settings.data.sequence)
    return asked.run


def _folder(asked: Options) -> Path:
    if not DOMAIN.fullmatch(asked.domain or ""):
        raise ConfigurationError(
            f"{'no domain' if asked.domain is None else f'domain={asked.domain!r:.80}'}: a name of letters a to z, digits, - and _ is needed, which "
            "becomes a folder; add --domain law."
        )
    if (asked.out / "run.toml").exists():
        raise ConfigurationError(
            f"{asked.out} is the folder of a run, and an ensemble needs its own; choose another --out."
        )
    return asked.out / str(asked.domain)


def _paid_for(asked: Options) -> Run:
    """The run with the number of steps for --flops."""
    run = asked.run_settings
    if asked.flops is None:
        return run
    step = flops_per_token(check(run), run.data.sequence) * run.data.tokens * run.placement.replicas
    if not step <= asked.flops < math.inf:
        raise ConfigurationError(
            f"flops={asked.flops:g}: a finite number is needed, at least {step:g}, for one inner step of all replicas; or a smaller model."
        )
    return run.changed(steps=int(asked.flops // step))


def _copy(source: Path, folder: Path) -> None:
    """Copy the run, without the files that only training needs; whole or not at all. Raises `ConfigurationError`, `OSError`."""
    if folder.exists():
        raise ConfigurationError(f"{folder} is there already; choose another --domain or --out, or remove it.")
    if folder.resolve().is_relative_to(source.resolve()):
        raise ConfigurationError(
            f"{folder} is within {source}, which would be copied into itself; choose another --out."
        )
    check_links(source)  # a copy would hold what they lead to
    draft = folder.with_name(f".{folder.name}-draft")
    shutil.rmtree(draft, ignore_errors=True)
    without = shutil.ignore_patterns("checkpoints*", "published", "logs", "hub", "expert.json")
    try:
        shutil.copytree(source, draft, ignore=without)
        draft.rename(folder)
    except shutil.Error as error:  # it has a line for each file
        raise OSError(error.args[0][0][2]) from None
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def _table(ensemble: Ensemble) -> Table:
    """The cost of each expert."""
    table = options.table(f"experts in {ensemble.folder}")
    for head in ("domain", "parameters", "tokens", "floating-point operations", "share"):
        table.add_column(head, justify="left" if head == "domain" else "right")
    total = sum(expert.flops for expert in ensemble.experts)
    for expert in ensemble.experts:
        row: tuple[Any, ...] = (f"{expert.parameters:,}", f"{expert.tokens:,}", f"{expert.flops:.3g}")
        table.add_row(expert.domain, *row, text_of_share(expert.flops / total if total else 0.0))
    table.caption = f"in all {total:.4g} (predicted from sizes and tokens); nothing was sent between experts"
    return table
