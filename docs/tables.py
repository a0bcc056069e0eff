"""Fill the tables of the pages below from the results that benchmarks wrote, and draw what is to be drawn: no number is typed by hand.

    python docs/tables.py            # or: make tables

A table stands between `<!-- table: benchmarks/results/NAME.json -->` and `<!-- end -->`; what the JSON's `benchmark` is decides its form.
With `all` before `-->` every method is in it, else those of HEADLINE. What is told of single recipes is in recipes.py.
tests/repo/test_pages.py holds that pages say what the files say.
"""

from __future__ import annotations

import json
import re
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from pathlib import Path
from statistics import median
from typing import Any

import recipes

from thinwire.app.report.charts import ChartState, colour
from thinwire.app.report.svg import drawing
from thinwire.catalogue.parsing import parse
from thinwire.comm import parse_link

ROOT = Path(__file__).parents[1]
PAGES = tuple(
    page.relative_to(ROOT).as_posix()
    for page in sorted([ROOT / "README.md", ROOT / "benchmarks/README.md", *ROOT.glob("docs/**/*.md")])
)
HEADLINE = (
    "Thinwire streaming_diloco",
    "Thinwire streaming_sign",
    "torchft DiLoCo, streaming (fp32)",
    "torch DDP (fp32)",
)
FIRST = (
    "data_parallel",
    "streaming_sign",
    "diloco",
    "streaming_diloco",
    "sparse_loco",
    "one_bit_adam",
)  # of the family, in the README
BLOCK = re.compile(r"(<!-- table: (\S+)( all)? -->\n).*?(<!-- end -->)", re.DOTALL)
Result = Mapping[str, Any]


def filled(text: str, root: Path = ROOT, page: str = "README.md") -> str:
    """`text` of `page` with every table as its file has it."""
    up = "../" * page.count("/")
    text = BLOCK.sub(lambda b: f"{b[1]}{table(root / b[2], b[2], bool(b[3]), up)}\n{b[4]}", text)
    return recipes.filled(text, root, up)


def table(path: Path, name: str, whole: bool, up: str = "") -> str:
    """Markdown for one result; a sentence where there is no result yet. `up` leads from the page to the root."""
    if not path.exists():
        return f"*Not measured yet: there is no `{name}`.*"
    result: Result = json.loads(path.read_text())
    if result["benchmark"] == "utilization" and not whole:
        rows = [row for row in result["rows"] if row["method"] in HEADLINE and "problem" not in row]
        result = dict(result) | {"rows": rows}
    if result["benchmark"] == "secure" and not whole:
        rows = [row for row in result["rows"] if row["method"] == "bare" or row["rtt_seconds"] == 0.1]
        result = dict(result) | {"rows": rows}
    if result["benchmark"] == "family" and not whole:
        heads, rows = quality(dict(result) | {"rows": [row for row in result["rows"] if row["strategy"] in FIRST]})
        return "\n".join([*_lines(heads, rows), "", provenance(result, name, up)])
    heads, rows = TABLES[result["benchmark"]](result)
    lines = [*_lines(heads, rows), "", provenance(result, name, up)]
    if result["benchmark"] in PICTURES:
        lines += ["", f"![{result['benchmark']}]({up}docs/pictures/{result['benchmark']}.svg)"]
    return "\n".join(lines)


def _lines(heads: list[str], rows: list[list[str]]) -> list[str]:
    left = (
        "method",
        "hub",
        "link",
        "workload",
        "texts",
        "other losses",
        "attack",
        "model",
        "setting",
        "worst moment",
        "stage",
        "format",
        "link, each way",
        "codec",
        "exchange",
    )
    align = ["---" if head in left else "---:" for head in heads]
    return [f"| {' | '.join(cells)} |" for cells in (heads, align, *rows)]


def provenance(result: Result, name: str, up: str) -> str:
    """Where the numbers are from, in one line."""
    machine, versions = result["machine"], result["versions"]
    gpu = f"{result['gpu']}, " if "gpu" in result else ""
    where = f"{gpu}{machine['cpu'].strip()}, {machine['cores']} cores, torch {versions['torch']}"
    return f"*{result['word'].capitalize()}: [{name}]({up}{name}), {result['date'][:10]}, {recipes.commits(result)}; {where}.*"


def utilization(result: Result) -> tuple[list[str], list[list[str]]]:
    """Rows of benchmarks/utilization.py: rates from fast to slow, methods in their order."""
    rows = []
    last = None
    for row in result["rows"]:
        rate = row["megabits_per_second"]
        if row["method"] == "bare":
            continue
        shown, last = f"{rate:.3g}" if rate != last else "", rate
        if "problem" in row:
            rows.append([shown, row["method"], "–", "–", row["problem"]])
        else:
            sent = f"{row['wire_nbytes_per_period'] / 1e6:.2f}"
            shares = [_spread(row, name) for name in ("of_bare", "utilization")]
            rows.append([shown, row["method"], *shares, sent])
    every = result["setting"]["every"]
    return ["Mbit/s", "method", "steps/s of bare", "utilization", f"MB sent in {every} steps"], rows


def quality(result: Result) -> tuple[list[str], list[list[str]]]:
    """Rows of `thinwire compare`; the first is the control."""
    control = result["rows"][0]
    rows = []
    for row in result["rows"]:
        spread = "" if row["eval_loss_spread"] is None else f" ± {row['eval_loss_spread']:.4f}"
        change = "control" if row is control else f"{row['eval_loss'] / control['eval_loss'] - 1:+.2%}"
        bits = row["bits_per_parameter_per_step"]
        times = control["bits_per_parameter_per_step"] / bits if bits and row is not control else 0
        fewer = f"{times:,.{int(times < 0.95)}f}×" if times else "–"
        rows.append(
            [row["strategy"], f"{row['eval_loss']:.4f}{spread}", change, f"{bits:.3g}", fewer, str(row["seeds"])]
        )
    return ["method", "evaluation loss", "loss", "bits per parameter and step", "fewer bits", "seeds"], rows


def family(result: Result) -> tuple[list[str], list[list[str]]]:
    """Rows of benchmarks/family.py: as `quality`, with what each method is."""
    heads, rows = quality(result)
    made = [row["composition"] for row in result["rows"]]
    shown = [_short(of).removeprefix("Strategy") if of.startswith("Strategy(") else of for of in made]
    return [heads[0], "settings", *heads[1:]], [[row[0], f"`{of}`", *row[1:]] for row, of in zip(rows, shown)]


def family_picture(result: Result) -> str:
    """Loss against bits, a dot a method, with a standard deviation to both sides."""
    kinds: dict[str, list[Mapping[str, Any]]] = {
        "deltas, every H steps": [],
        "gradients, every step": [],
        "federated": [],
    }
    for row in result["rows"]:
        made = row["composition"]
        kind = 2 if not made.startswith("Strategy(") else 1 if "signal=Gradients()" in made else 0
        list(kinds.values())[kind].append(row)
    data: list[dict[str, Any]] = []
    for index, (kind, rows) in enumerate(kinds.items()):
        look: dict[str, Any] = {
            "line": {"color": colour(index), "width": 2},
            "marker": {"color": colour(index), "size": 9},
        }
        bits, losses = [row["bits_per_parameter_per_step"] for row in rows], [row["eval_loss"] for row in rows]
        names = [row["strategy"] for row in rows]
        data.append({"mode": "markers+text", "x": bits, "y": losses, "text": names, "name": kind, **look})
        for at, loss, row in zip(bits, losses, rows, strict=True):
            if not (spread := row["eval_loss_spread"]):
                continue
            ends = [loss - spread, loss + spread]
            data.append({"mode": "lines", "x": [at, at], "y": ends, "name": "", "showlegend": False, **look})
    x = {"title": {"text": "bits per parameter and inner step, sent by a replica"}, "type": "log"}
    layout = {"xaxis": x, "yaxis": {"title": {"text": "evaluation loss"}}}
    machine, setting, seeds = result["machine"], result["setting"], result["rows"][0]["seeds"]
    remark = (
        f"{result['word'].capitalize()}, {result['date'][:10]}: mean and standard deviation of {seeds} seed(s), "
        f"{setting['replicas']} replicas, model {setting['model']}, {setting['steps']} steps; every method with its defaults. "
        f"{machine['cpu'].strip()}, commit {(result['commit'] or 'unknown')[:7]}."
    )
    return drawing(ChartState("", data, layout), "Loss against bits, at equal tokens", remark)


# times fewer bits, for which a composition is recommended
ORDERS = (10, 20, 50, 100, 200, 500, 1_000, 2_000, 5_000, 10_000)


def recommended(rows: Sequence[Mapping[str, Any]]) -> dict[str, list[int]]:
    """For each composition the numbers of ORDERS at which it has the lowest loss of those that send that many times fewer bits."""
    found: dict[str, list[int]] = {}
    for order in ORDERS:
        if able := [row for row in rows if _fewer(row, rows[0]) >= order]:
            best = min(able, key=lambda row: row["eval_loss"])
            found.setdefault(best["strategy"], []).append(order)
    return found


def frontier(result: Result) -> tuple[list[str], list[list[str]]]:
    """Rows of benchmarks/frontier.py: as `quality`, and where each composition is recommended."""
    heads, rows = quality(result)
    best = recommended(result["rows"])
    at = [", ".join(f"{order:,}×" for order in best.get(row[0], [])) or "–" for row in rows]
    return [*heads, "the best from"], [[f"`{row[0]}`", *row[1:], orders] for row, orders in zip(rows, at, strict=True)]


def frontier_picture(result: Result) -> str:
    """Loss above the control's against times fewer bits: a dot a composition, with a standard deviation to both sides."""
    rows, control, best = result["rows"][1:], result["rows"][0], recommended(result["rows"])
    data: list[dict[str, Any]] = []
    for index, name in enumerate(("recommended", "others")):
        look = {"line": {"color": colour(index), "width": 2}, "marker": {"color": colour(index), "size": 9}}
        shown = [row for row in rows if (row["strategy"] in best) == (name == "recommended")]
        at, above = [_fewer(row, control) for row in shown], [_above(row["eval_loss"], control) for row in shown]
        names = [row["label"] for row in shown]
        data.append({"mode": "markers+text", "x": at, "y": above, "text": names, "name": name, **look})
        for x, row in zip(at, shown, strict=True):
            if spread := row["eval_loss_spread"]:
                ends = [_above(row["eval_loss"] + side * spread, control) for side in (-1, 1)]
                data.append({"mode": "lines", "x": [x, x], "y": ends, "name": "", "showlegend": False, **look})
    x = {"title": {"text": "times fewer bits than fp32 gradients at every step"}, "type": "log"}
    layout = {"xaxis": x, "yaxis": {"title": {"text": "loss above data-parallel's, %"}}}
    machine, setting, seeds = result["machine"], result["setting"], control["seeds"]
    remark = (
        f"{result['word'].capitalize()}, {result['date'][:10]}: mean and standard deviation of {seeds} seed(s), "
        f"{setting['replicas']} replicas, model {setting['model']}, {setting['steps']} steps, equal tokens. "
        f"{machine['cpu'].strip()}, commit {(result['commit'] or 'unknown')[:7]}."
    )
    return drawing(ChartState("", data, layout), "What fewer bits cost", remark)


def _fewer(row: Mapping[str, Any], control: Mapping[str, Any]) -> float:
    return float(control["bits_per_parameter_per_step"] / row["bits_per_parameter_per_step"])


def _above(loss: float, control: Mapping[str, Any]) -> float:
    return 100 * (loss / control["eval_loss"] - 1)


def zoo(result: Result) -> tuple[list[str], list[list[str]]]:
    """Rows of benchmarks/zoo.py: a workload's first loss, and the others that it names."""
    rows, last = [], None
    for row in result["rows"]:
        (name, loss), *others = row["losses"].items()
        spread = "" if row["eval_loss_spread"] is None else f" ± {row['eval_loss_spread']:.4f}"
        rest = ", ".join(f"{what} {value:.4f}" for what, value in others)
        shown, last = "" if row["workload"] == last else row["workload"], row["workload"]
        over = row.get("over link")
        busy = f"{over['compute_utilization']:.0%}" if over else ""
        cost = [f"{row['bits_per_parameter_per_step']:.3g}", busy, str(row["seeds"])]
        rows.append([shown, f"`{row['strategy']}`", f"{name} {loss:.4f}{spread}", rest, *cost])
    link = f"time in inner steps, {result['setting']['link']} (emulated)"
    return ["workload", "method", "first loss", "other losses", "bits per parameter and step", link, "seeds"], rows


def zoo_picture(result: Result) -> str:
    """Each workload's first loss beside data-parallel training's, against bits: a line a workload."""
    data = []
    for index, workload in enumerate(dict.fromkeys(row["workload"] for row in result["rows"])):
        rows = [row for row in result["rows"] if row["workload"] == workload and "--" not in row["strategy"]]
        (control,) = (row["eval_loss"] for row in rows if row["strategy"] == "data_parallel")
        points = sorted((row["bits_per_parameter_per_step"], row["eval_loss"] / control) for row in rows)
        bits, ratios = zip(*points, strict=True)
        look = {"line": {"color": colour(index), "width": 2}, "marker": {"color": colour(index), "size": 9}}
        data.append({"mode": "lines+markers", "x": list(bits), "y": list(ratios), "name": workload, **look})
    x = {"title": {"text": "bits per parameter and inner step, sent by a replica"}, "type": "log"}
    y = {"title": {"text": "first loss / data-parallel training's"}, "type": "log"}
    remark = (
        f"{result['word'].capitalize()}, {result['date'][:10]}: means of {result['setting']['seeds']} seeds, 2 replicas, equal samples, "
        "defaults. From the right: data_parallel, qsgd, Sign(block=64), streaming_sign, streaming_diloco"
    )
    return drawing(ChartState("", data, {"xaxis": x, "yaxis": y}), "A zoo of workloads", remark)


def experts(result: Result) -> tuple[list[str], list[list[str]]]:
    """Rows of benchmarks/experts.py: the loss on each domain, and their mean."""
    rows, last = [], None
    for row in result["rows"]:
        losses = [f"{loss:.4f}" for loss in row["losses"].values()]
        losses = [
            shown + ("" if spread is None else f" ± {spread:.4f}")
            for shown, spread in zip(losses, row["spread"].values())
        ]
        mean = sum(row["losses"].values()) / len(row["losses"])
        shown, last = "" if row["texts"] == last else row["texts"], row["texts"]
        rows.append([shown, row["model"], *losses, f"{mean:.4f}", str(row["seeds"])])
    return ["texts", "model", *result["rows"][0]["losses"], "mean", "seeds"], rows


def codistill(result: Result) -> tuple[list[str], list[list[str]]]:
    """Rows of benchmarks/codistill.py: each model in each arm, and the differences to itself alone, seed by seed."""
    rows, order = [], result["setting"]["models"]
    for row in sorted(result["rows"], key=lambda row: order.index(row["model"])):
        spreads = [
            "" if spread is None else f" ± {spread:{form}}"
            for spread, form in ((row["eval_loss_spread"], ".4f"), (row["against alone, spread"], ".2%"))
        ]
        against = "control" if row["arm"] == "alone" else f"{row['against alone']:+.2%}{spreads[1]}"
        loss = f"{row['eval_loss']:.4f}{spreads[0]}"
        rows.append([row["model"], row["arm"], loss, against, f"{row['bytes sent a step']:,.0f}", str(row["seeds"])])
    return ["model", "arm", "evaluation loss", "against alone", "bytes sent a step", "seeds"], rows


def attach(result: Result) -> tuple[list[str], list[list[str]]]:
    """Cases of benchmarks/attach.py."""
    rows = []
    for name, case in result["cases"].items():
        low, high = case["ratio_quartiles"]
        ratio = f"{case['ratio']:.4f} ({low:.4f} … {high:.4f})"
        rows.append([name, f"{case['bare_seconds'] * 1e3:.4g}", ratio, f"{case['control_ratio']:.4f}"])
    return ["model", "bare step, ms", "attached / bare (quartiles)", "bare / bare"], rows


def entropy(result: Result) -> tuple[list[str], list[list[str]]]:
    """Rows of benchmarks/entropy.py: bytes of a run without and with Entropy, beside the symbols' entropy; GB/s of fp32."""
    rows = []
    for codec in dict.fromkeys(row["codec"] for row in result["rows"]):
        runs = [row for row in result["rows"] if row["codec"] == codec]
        saved = [row["coded"] / row["nbytes"] - 1 for row in runs]
        over = [row["coded"] / row["entropy"] - 1 for row in runs]
        speeds = [
            " → ".join(f"{median(row[how][what] for row in runs):.1f}" for how in ("alone", "with_entropy"))
            for what in ("encode", "decode")
        ]
        nbytes = [f"{median(row[name] for row in runs):,.0f}" for name in ("nbytes", "coded")]
        rows.append([f"`{_short(codec)}`", *nbytes, _span(saved), _span(over), *speeds])
    return ["codec", "bytes", "with `Entropy`", "saved", "beside the entropy", "encode", "decode"], rows


def _span(shares: Sequence[float]) -> str:
    low, high = (f"{share:+.1%}".replace("-", "−") for share in (min(shares), max(shares)))
    return f"{low} … {high}"


def formats(result: Result) -> tuple[list[str], list[list[str]]]:
    """Rows of benchmarks/formats.py: of each format its bits, its error on everything, and what feedback gets through."""
    data = list(result["rows"][0]["data"])
    rows, kind = [], None
    for row in result["rows"]:
        if row["of"] != kind:
            kind = row["of"]
            rows.append([f"*{kind}*", *[""] * (len(data) + 4)])
        found = row["data"]["outer gradient"]
        errors = ["–" if at is None else _error(at["error"]) for at in row["data"].values()]
        held = _error(row["held_back"]) if row["held_back"] >= 5e-4 else "0"
        rows.append(
            [
                f"`{_short(row['codec'])}`",
                f"{found['bits']:.2f}",
                *errors,
                f"{found['zeros']:.0%}",
                f"{found['cosine']:.3f}",
                held,
            ]
        )
    return ["format", "bits", *data, "zeros", "cosine", "held back"], rows


def _error(share: float) -> str:
    return f"{share:.2%}" if share < 0.1 else f"{share:.0%}"


def _short(codec: str) -> str:
    """As one would write it: without what is the default anyway."""
    return repr_without_defaults(parse(codec))


def repr_without_defaults(piece: object) -> str:
    if not is_dataclass(piece):
        return repr(piece)
    shown: list[str] = []
    for place, field in enumerate(fields(piece)):
        value = getattr(piece, field.name)
        if value != field.default:
            name = "" if place == len(shown) else f"{field.name}="
            shown.append(name + repr_without_defaults(value))
    return f"{type(piece).__name__}({', '.join(shown)})"


def exchange(result: Result) -> tuple[list[str], list[list[str]]]:
    """Rows of benchmarks/exchange.py: what each exchange took, beside gloo's all-reduce of the same tensor."""
    of = ("link", "replicas", "nbytes", "codec")
    beside = {tuple(row[key] for key in of): row for row in result["rows"] if row["exchange"] == "gloo all-reduce"}
    rows = []
    for row in result["rows"]:
        if row["exchange"] == "gloo all-reduce":
            continue
        pace = "paced" if row["uplink"] else "plain"
        name = f"{row['exchange'].removesuffix('()')}, {pace}{', idle' if row['idle_seconds'] else ''}"
        reduced = beside.get(tuple(row[key] for key in of))
        rows.append(
            [row["link"] + doubt(row), str(row["replicas"]), f"{row['nbytes'] / 1e6:g}", row["codec"].removesuffix("()"), name,
             f"{row['seconds']:.3f}", f"{row['ideal_seconds']:.3f}", f"{row['of_ideal']:.2f}",
             f"{reduced['seconds']:.3f}" if reduced else "–"]
        )  # fmt: skip
    heads = [
        "link, each way",
        "replicas",
        "packet, MB",
        "codec",
        "exchange",
        "s",
        "ideal, s",
        "of ideal",
        "gloo all-reduce, s",
    ]
    return heads, rows


def secure(result: Result) -> tuple[list[str], list[list[str]]]:
    """Rows of benchmarks/secure.py, link by link: utilization, exchanges beside their ideal, control beside bulk, bytes."""
    bare = next(row["steps_per_second"] for row in result["rows"] if row["method"] == "bare")
    shaped = [row for row in result["rows"] if row["method"] != "bare"]
    rates = {row["rate"]: place for place, row in enumerate(shaped)}
    rows = []
    for row in sorted(
        shaped, key=lambda row: (rates[row["rate"]], row["method"] == "streaming_sign", row["rtt_seconds"])
    ):
        rate = f"{row['bits_per_second'] / 1e6:.3g}"
        link = f"{'1.2 × floor: ' * (row['rate'] == 'floor')}{rate} Mbit/s, {row['rtt_seconds'] * 1e3:.0f} ms"
        name = f"{row['method']}, {CARRIERS[row['carrier']]}" if row["carrier"] else row["method"]
        if "problem" in row:
            rows.append([link, name, *["–"] * 5, row["problem"]])
            continue
        times = [f"{one['seconds']:.2f} ({one['of_ideal']:.2f})" for one in row.get("exchanges", ())]
        held = row.get("control")
        control = f"{held['p50']:.2f}, {held['p99']:.2f} ({held['goal_seconds']:.2f})" if held else "–"
        rows.append(
            [link + " †" * row["busy"], name, _share(row["utilization"]), _share(row["steps_per_second"] / bare),
             *(times or ["–", "–"]), control, f"{row['wire_nbytes_per_period'] / 1e6:.2f}"]
        )  # fmt: skip
    times = ["1 MB, s (of ideal)", "4 MB, s (of ideal)", "control p50, p99 (goal), s"]
    return ["link", "method", "utilization", "steps/s of bare", *times, "MB sent in 30 steps"], rows


CARRIERS = {"secure": "secure carrier", "gloo": "gloo", "tls": "TLS sockets"}


def doubt(row: Mapping[str, Any]) -> str:
    """A mark where the router was late by more than a tenth of the round trip, one time in a hundred."""
    late = row["router"]["late_seconds"]["p99"]
    return " †" if late > 0.2 * parse_link(row["link"]).delay_seconds else ""


def simulate(result: Result) -> tuple[list[str], list[list[str]]]:
    """Cases of benchmarks/simulate.py."""
    rows = []
    for case in result["cases"]:
        shared = f", {case['sharing']} an uplink" if case["sharing"] > 1 else ""
        row = [
            f"{case['replicas']:,}{shared}",
            f"{case['virtual_seconds'] / 3600:.1f} h",
            f"{case['events'] / 1e6:,.0f}",
        ]
        row += [
            f"{case['seconds']:.1f}",
            f"{case['cpu_seconds']:.1f}",
            f"{case['nanoseconds_per_flight_event']:.0f}",
            f"{case['peak_nbytes'] / 1e6:.0f}",
        ]
        rows.append(row)
    heads = ["replicas", "virtual time", "million events", "seconds", "of CPU", "ns of CPU a flight event", "peak MB"]
    return heads, rows


def memory(result: Result) -> tuple[list[str], list[list[str]]]:
    """Rows of benchmarks/memory.py, in megabytes."""
    rows = []
    for row in result["rows"]:
        sizes = (f"{row[name] / 1e6:.0f}" for name in ("predicted_nbytes", "measured_nbytes"))
        rows.append(
            [row["setting"], row["phase"], *sizes, f"{row['ratio']:.3f}", f"{row['default_malloc_nbytes'] / 1e6:.0f}"]
        )
    return [
        "setting",
        "worst moment",
        "predicted, MB",
        "peak, MB",
        "predicted / peak",
        "peak with glibc's defaults, MB",
    ], rows


def passes(result: Result) -> tuple[list[str], list[list[str]]]:
    """Rows of benchmarks/passes.py, beside those of an earlier version if they are there."""
    names, rows = ("read_nbytes", "written_nbytes", "buffers"), []
    earlier = result.get("before", {}).get("rows", [None] * len(result["rows"]))
    total = {"stage": "together"} | {name: sum(row[name] for row in result["rows"]) for name in names}
    totals = {name: sum(row[name] for row in earlier) for name in names} if earlier[0] else None
    for row, before in zip([*result["rows"], total], [*earlier, totals]):
        were = [f"{before[name]:.1f} → " if before else "" for name in names]
        ms = f"{1e3 * row['seconds']:.1f}" if row.get("seconds") else ""
        rows.append([row["stage"], *(f"{was}{row[name]:.1f}" for was, name in zip(were, names)), ms])
    return ["stage", "bytes read", "bytes written", "new buffers", "ms"], rows


def calibration(result: Result) -> tuple[list[str], list[list[str]]]:
    """Rows of benchmarks/calibration.py."""
    rows = []
    for row in result["rows"]:
        error = row["simulated"] / row["emulated"] - 1
        rate, shares = f"{row['bits_per_second'] / 1e6:.3g}", (f"{row[name]:.1%}" for name in ("simulated", "emulated"))
        setting = [str(row["replicas"]), row["method"], row["how"], f"{row['of_floor']:g}", rate]
        rows.append([*setting, *shares, f"{error:+.1%}"])
    return ["replicas", "method", "step", "× the floor", "Mbit/s", "simulated", "emulated", "error"], rows


def elastic(result: Result) -> tuple[list[str], list[list[str]]]:
    """Methods of benchmarks/elastic.py."""
    rows = []
    for row in result["rows"]:
        if "problem" in row:
            rows.append([row["method"], row["problem"], *["–"] * 5])
            continue
        back = "not in the window" if row["return_seconds"] is None else f"{row['return_seconds']:.1f}"
        lost = [f"{row['survivors_lost_steps']:.0f}", f"{row['killed_lost_steps']:.0f}"]
        still = [f"{row['standstill_seconds']:.2f}", f"{row['standstill_steps']:.1f}"]
        rows.append([row["method"], *lost, *still, back, _share(row["utilization"])])
    heads = ["method", "steps lost by survivors (inferred)", "by the killed", "longest standstill, s", "in steps"]
    return [*heads, "returner counted after, s", "utilization"], rows


def joiner(result: Result) -> tuple[list[str], list[list[str]]]:
    """Rows of benchmarks/joiner.py: what a member takes over that missed some rounds."""
    whole = result["setting"]["state_nbytes"]
    rows = [
        [row["case"], "–" if row["rounds"] is None else f"{row['rounds']:,}", f"{row['nbytes'] / 1e6:.1f}",
         f"{row['nbytes'] / whole:.0%}", f"{row['seconds']:.1f}"]
        for row in result["rows"]
    ]  # fmt: skip
    return ["member", "rounds missed", "MB", "of the state", "seconds"], rows


def codecs(result: Result) -> tuple[list[str], list[list[str]]]:
    """Rows of benchmarks/codecs.py: the sizes that packets of deltas have."""
    rows = []
    for row in result["rows"]:
        if row["nbytes"] >= 1 << 24:
            ours = [f"{row[name]:.1f} ({row[f'{name}_of_copy'][1]:.2f})" for name in ("encode", "decode")]
            torch = [f"{row[f'{name}_reference']:.2g}" for name in ("encode", "decode")]
            size = [f"{row['bits']:.3g}", f"{row['nbytes'] >> 20}", f"{row['copy']:.1f}"]
            rows.append([f"`{_short(row['codec'])}`", *size, *ours, *torch])
    heads = ["codec", "bits", "MiB", "copy", "encode (of copy)", "decode (of copy)", "encode, torch", "decode, torch"]
    return heads, rows


def codecs_gpu(result: Result) -> tuple[list[str], list[list[str]]]:
    """Rows of benchmarks/codecs_gpu.py, of the sizes at which the launch of a kernel does not decide."""
    rows = []
    for row in result["rows"]:
        if row["nbytes"] >= 1 << 24:
            speeds = [f"{row[name]:,.0f} ({row[f'{name}_of_copy']:.2f})" for name in ("encode", "decode")]
            rows.append([f"`{_short(row['codec'])}`", f"{row['nbytes'] >> 20}", f"{row['copy']:,.0f}", *speeds])
    return ["codec", "MiB", "copy", "encode (of copy)", "decode (of copy)"], rows


def unequal(result: Result) -> tuple[list[str], list[list[str]]]:
    """Rows of benchmarks/unequal.py: times are steps of the fastest machine (simulated) or wall seconds (emulated)."""
    heads = ["speeds", "method", "number is", "loss", "against the control", "time", "time to the control's loss"]
    rows = []
    for row in result["rows"]:
        first = [row["speeds"], row["kind"], row["word"]]
        if "problem" in row:
            rows.append([*first, row["problem"].splitlines()[-1][:60], "–", "–", "–"])
            continue
        time = f"{row['time']:.1f} s" if row["word"] == "emulated" else f"{row['time']:.0f}"
        change = f"{row['of_control']:+.2%}" if "of_control" in row else "–"
        reached = row.get("time_to_loss")
        rows.append([*first, f"{row['loss']:.4f}", change, time, "–" if reached is None else f"{reached:.0f}"])
    return heads, rows


def same_time(result: Result) -> tuple[list[str], list[list[str]]]:
    """Rows of benchmarks/unequal.py --time: a cell a row; times are steps of the fastest machine."""
    heads = ["speeds", "steps", "seeds", "time", "equal machines", "`decoupled_diloco`", "the fast alone"]
    heads += ["against equal machines", "against the fast"]
    rows = []
    for row in result["rows"]:
        losses = row["losses"]
        means = [sum(losses[kind]) / len(losses[kind]) for kind in ("control", "decoupled_diloco", "the fast alone")]
        rows.append(
            [
                row["speeds"],
                f"{row['steps']}",
                f"{len(row['seeds'])}",
                f"{row['time']:.0f}",
                *(f"{mean:.4f}" for mean in means),
                *(
                    f"{row[of]:+.2%}" + ("" if row[f"error_{of}"] is None else f" ± {row[f'error_{of}']:.2%}")
                    for of in ("of_control", "of_fast")
                ),
            ]
        )
    return heads, rows


def smaller_batches(result: Result) -> tuple[list[str], list[list[str]]]:
    """Rows of benchmarks/unequal_batches.py: a cell a row; times are steps of the fastest machine."""
    heads = ["speeds", "batches", "seeds", "time", "smaller batches", "equal batches", "the fast alone"]
    heads += ["against equal batches", "against the fast"]
    rows = []
    for row in result["rows"]:
        each = list(row["losses"].values())
        changes = [
            ("–" if row[of] is None else f"{row[of]:+.2%}")
            + ("" if row[f"error_{of}"] is None else f" ± {row[f'error_{of}']:.2%}")
            for of in ("of_default", "of_fast")
        ]
        means = ["–" if None in losses else f"{sum(losses) / len(each):.4f}" for losses in zip(*each)]
        batches = ", ".join(map(str, dict.fromkeys(row["batches"])))
        rows.append([row["speeds"], batches, f"{len(each)}", f"{row['time']:.0f}", *means, *changes])
    return heads, rows


def sites(result: Result) -> tuple[list[str], list[list[str]]]:
    """Rows of benchmarks/unequal.py --sites: times are steps of the fastest machine, bytes those that all replicas sent."""
    heads = ["method", "number is", "loss", "against the control", "time", "MB between sites", "MB within sites"]
    rows = []
    for row in result["rows"]:
        nbytes = [f"{row[name] / 1e6:.2f}" for name in ("nbytes_between", "nbytes_within")]
        change = f"{row['of_control']:+.2%}"
        rows.append([row["kind"], row["word"], f"{row['loss']:.4f}", change, f"{row['time']:.0f}", *nbytes])
    return heads, rows


def robust(result: Result) -> tuple[list[str], list[list[str]]]:
    """Rows of benchmarks/robust.py: an attack a row, a rule a column; last what a rule costs."""
    rules, attacks = ([*dict.fromkeys(row[of] for row in result["rows"])] for of in ("rule", "attack"))
    losses = {(row["attack"], row["rule"]): row for row in result["rows"]}
    short = {"NearestNeighbourMixing": "NNM", "()": "", "CenteredClipping": "Clipping", "GeometricMedian": "GeoMedian"}

    def shown(attack: str, rule: str) -> str:
        row = losses.get((attack, rule))
        if row is None:
            return "–"
        return (
            "no rounds"
            if row["refused"] > result["setting"]["steps"] / result["setting"]["every"] / 2
            else f"{row['loss']:.3f}"
        )

    rows = [
        [f"`{attack}`" if attack != "none" else "nobody lies", *(shown(attack, rule) for rule in rules)]
        for attack in attacks
    ]
    costs = result["costs"]
    rows.append(["CPU ms a million values", *(f"{1000 * costs[rule]:,.0f}" for rule in rules)])
    names = list(rules)
    for long, brief in short.items():
        names = [name.replace(long, brief) for name in names]
    return ["attack", *names], rows


def trust(result: Result) -> tuple[list[str], list[list[str]]]:
    """Rows of benchmarks/trust.py: an attack a row, a method a column; mean accuracy over seeds, and the worst honest replica of all."""
    methods, attacks = ([*dict.fromkeys(row[of] for row in result["rows"])] for of in ("method", "attack"))

    def shown(attack: str, method: str) -> str:
        cells = [row for row in result["rows"] if (row["attack"], row["method"]) == (attack, method)]
        mean = sum(row["accuracy"] for row in cells) / len(cells)
        return f"{mean:.1%} ({min(row['worst'] for row in cells):.0%})"

    rows = [
        [f"`{attack}`" if attack != "none" else "nobody lies", *(shown(attack, method) for method in methods)]
        for attack in attacks
    ]
    return ["attack", *methods], rows


def follow(result: Result) -> tuple[list[str], list[list[str]]]:
    """Rows of benchmarks/follow.py: a run a row, how often a follower comes a column."""
    lags = [*dict.fromkeys(row["rounds"] for row in result["rows"])]
    runs: dict[str, dict[int, Mapping[str, Any]]] = {}
    for row in result["rows"]:
        runs.setdefault(row["run"], {})[row["rounds"]] = row
    rows = [
        [
            name,
            f"{of[lags[0]]['full_nbytes']:,}",
            *(f"{of[lag]['nbytes']:,.0f} ({_share(of[lag]['share'])})" for lag in lags),
        ]
        for name, of in runs.items()
    ]
    return ["bytes of a visit", "full copy", *(f"after {lag} round{'s' * (lag > 1)}" for lag in lags)], rows


def coding(result: Result) -> tuple[list[str], list[list[str]]]:
    """Rows of benchmarks/coding.py: a method a row, a case a column; seconds a step, means over seeds."""
    cases = result["cases"]
    rows = [
        [
            method,
            *(f"{statistics.fmean(run['seconds_per_step'] for run in case['methods'][method]):.2f}" for case in cases),
        ]
        for method in cases[0]["methods"]
    ]
    return ["method", *(case["case"] for case in cases)], rows


def deadlines(result: Result) -> tuple[list[str], list[list[str]]]:
    """Rows of benchmarks/deadlines.py: a way a row, a trace a column; seconds stalled, utilization, mean held-out loss."""
    of: dict[str, dict[str, Mapping[str, Any]]] = {}
    for row in result["rows"]:
        of.setdefault(row["way"], {})[row["trace"]] = row
    traces = [*dict.fromkeys(row["trace"] for row in result["rows"])]
    rows = [
        [
            f"`{re.sub(r', (scale|rounding)=[^,)]*|(scale|rounding)=[^,)]*, ', '', way)}`" if "(" in way else way,
            *(
                f"{one['stall_seconds']:.1f} s, {one['utilization']:.1%}"
                + (f", {statistics.fmean(one['losses']):.3f}" if one["losses"] else "")
                for one in (found[trace] for trace in traces)
            ),
        ]
        for way, found in of.items()
    ]
    return ["sent in", *traces], rows


def decentralised(result: Result) -> tuple[list[str], list[list[str]]]:
    """Rows of benchmarks/decentralised.py: a method on a graph; losses over seeds, bytes of the busiest, seconds of a step."""
    heads = ["method", "graph", "replicas", "loss", "own loss", "apart", "busiest link, MB", "busiest replica, MB"]
    rows = []
    for row in result["rows"]:
        times = [row.get(name) for name in ("seconds", "seconds_slow")]
        rows.append(
            [row["method"], row["topology"], str(row["replicas"]),
             f"{row['loss']:.4f}" + (f" ± {row['spread']:.4f}" if row["spread"] else ""), f"{row['own_loss']:.4f}",
             f"{row['distance']:.2%}", f"{row['link_nbytes'] / 1e6:.3g}", f"{row['replica_nbytes'] / 1e6:.3g}",
             *("–" if one is None else f"{one:.2f}" for one in times)]
        )  # fmt: skip
    return [*heads, "s a step", "with a slow path"], rows


def decentralised_picture(result: Result) -> str:
    """Loss against the bytes of the busiest replica, a dot a method on a graph."""
    data = []
    for index, size in enumerate(dict.fromkeys(row["replicas"] for row in result["rows"])):
        rows = [row for row in result["rows"] if row["replicas"] == size]
        data.append(
            {"mode": "markers+text", "x": [row["replica_nbytes"] / 1e6 for row in rows], "y": [row["loss"] for row in rows],
             "text": [f"{row['method']}, {row['topology']}" for row in rows], "name": f"{size} replicas",
             "line": {"color": colour(index), "width": 2}, "marker": {"color": colour(index), "size": 9}}
        )  # fmt: skip
    x = {"title": {"text": "MB that the busiest replica sends"}, "type": "log"}
    layout = {"xaxis": x, "yaxis": {"title": {"text": "held-out loss of what is saved"}}}
    return drawing(
        ChartState("", data, layout), "Gossip beside methods in which all hear all, at equal tokens", _remark(result)
    )


CUT = ("whole", "cut")


def cut(result: Result) -> tuple[list[str], list[list[str]]]:
    """Rounds of benchmarks/decentralised.py --cut: the last before it, the last of it, and later ones."""
    third = len(result["rows"]) // 3
    told = {
        1: "",
        third: "last before the cut",
        2 * third: "last of the cut",
        2 * third + 1: "healed",
        3 * third: "end",
    }
    rows = []
    for row in result["rows"]:
        if (number := int(row["round"])) in told and told[number]:
            parts = [f"{row[f'{name} {what}']:.2%}" for what in ("within", "between") for name in reversed(CUT)]
            rows.append([told[number], str(number), *parts, *(f"{row[f'{name} loss']:.4f}" for name in reversed(CUT))])
    heads = ["", "round", "within the halves", "whole ring", "between the halves", "whole ring", "loss", "whole ring"]
    return heads, rows


def cut_picture(result: Result) -> str:
    """How far apart replicas are, round by round, on the cut ring and on the whole one."""
    data = []
    for index, what in enumerate(("between", "within")):
        for name in reversed(CUT):
            line = {"color": colour(index), "width": 2} | ({"dash": "dash"} if name == "whole" else {})
            ring = "cut in two" if name == "cut" else "whole ring"
            data.append(
                {"mode": "lines", "x": [row["round"] for row in result["rows"]], "name": f"{what} the halves, {ring}",
                 "y": [row[f"{name} {what}"] for row in result["rows"]], "line": line}
            )  # fmt: skip
    layout = {"xaxis": {"title": {"text": "round"}}, "yaxis": {"title": {"text": "distance / norm of the mean"}}}
    third = len(result["rows"]) // 3
    title = f"A ring of eight, cut in two from round {third + 1} to {2 * third}"
    return drawing(ChartState("", data, layout), title, _remark(result))


def _remark(result: Result) -> str:
    setting, machine = result["setting"], result["machine"]
    return (
        f"{result['word'].capitalize()}, {result['date'][:10]}: {setting['steps']} steps, {len(setting['seeds'])} seed(s). "
        f"{machine['cpu'].strip()}, commit {(result['commit'] or 'unknown')[:7]}."
    )


def _share(value: float | None) -> str:
    return "–" if value is None else f"{value:.1%}"


def _spread(row: Mapping[str, Any], name: str) -> str:
    """A median, and the least and the greatest of its windows, if there were several."""
    spread = [f"{100 * value:.1f}" for value in row.get(f"{name}_spread", ())]
    return _share(row[name]) + (f" ({'…'.join(spread)})" if spread else "")


TABLES: dict[str, Callable[[Result], tuple[list[str], list[list[str]]]]] = {
    "utilization": utilization,
    "quality": quality,
    "frontier": frontier,
    "attach": attach,
    "formats": formats,
    "entropy": entropy,
    "exchange": exchange,
    "secure": secure,
    "simulate": simulate,
    "memory": memory,
    "passes": passes,
    "codecs": codecs,
    "codecs_gpu": codecs_gpu,
    "family": family,
    "calibration": calibration,
    "elastic": elastic,
    "joiner": joiner,
    "robust": robust,
    "trust": trust,
    "follow": follow,
    "zoo": zoo,
    "experts": experts,
    "codistill": codistill,
    "unequal": unequal,
    "sites": sites,
    "same_time": same_time,
    "smaller_batches": smaller_batches,
    "coding": coding,
    "deadlines": deadlines,
    "decentralised": decentralised,
    "cut": cut,
}
PICTURES: dict[str, Callable[[Result], str]] = {
    "family": family_picture,
    "frontier": frontier_picture,
    "zoo": zoo_picture,
    "decentralised": decentralised_picture,
    "cut": cut_picture,
}


def main() -> None:
    for page in PAGES:
        (ROOT / page).write_text(filled((ROOT / page).read_text(), page=page))
    for name, picture in PICTURES.items():
        path = ROOT / "benchmarks" / "results" / f"{name}.json"
        if path.exists():
            drawn = ROOT / "docs" / "pictures" / f"{name}.svg"
            drawn.parent.mkdir(exist_ok=True)
            drawn.write_text(picture(json.loads(path.read_text())))


if __name__ == "__main__":
    main()
