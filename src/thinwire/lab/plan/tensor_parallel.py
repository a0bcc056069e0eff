"""Derives a tensor-parallel plan for a site from the names and shapes of layers, with a reason for each. Pure; `split.py` applies it.

The two rules of Redco (arXiv 2310.16355), which need no input from the user:

    attention    q, k, v are split by their outputs, whole heads each, and o by its inputs
    other        a layer that widens is split by its outputs, the one that narrows again by its inputs; layers of equal width in turn

A split by inputs ends in an all-reduce. So does the gradient of the input of a split by outputs: two all-reduces forward and two
backward in a block. Token embeddings are split by rows, the output head by outputs, which are gathered; tied ones are split alike.
Norms, positions and layers to which no rule surely applies stay whole on every rank. *Differs*: a group of layers is split
together or not at all; a fused qkv is split within each of its three parts; if one layer is not divisible, all layers of its name
stay whole.

>>> up, down = Layer("mlp.up", "linear", (64, 256)), Layer("mlp.down", "linear", (256, 64))
>>> [(row.pattern, row.split) for row in derive([up, down], ranks=4).rows]
[('mlp.up', 'outputs'), ('mlp.down', 'inputs')]
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Literal, NamedTuple, get_args

from thinwire.comm import Link
from thinwire.errors import ConfigurationError

Kind = Literal["linear", "transposed", "embedding", "other"]
Split = Literal["outputs", "inputs", "gathered", "rows", "heads", "summed", "whole"]
SPLITS: tuple[Split, ...] = get_args(Split)

_QKV, _FUSED = {"q", "k", "v", "query", "key", "value"}, {"qkv", "c_attn"}
_WIDENS, _NARROWS = {"up", "gate", "wi", "in"}, {"down", "wo", "out"}
_POSITIONS = {"pos", "position", "positions", "wpe"}


class Layer(NamedTuple):
    """The facts of a layer, or of a parameter outside of layers, that the rules use.

    shape        inputs, outputs; for an embedding rows, width; otherwise the parameter's shape
    bias         whether it has a bias of its outputs
    tied         the name of an earlier layer that has the same weight
    head_width   the head width that the enclosing attention declares; 0: none
    """

    name: str
    kind: Kind
    shape: tuple[int, ...]
    bias: bool = False
    tied: str = ""
    head_width: int = 0

    @property
    def words(self) -> set[str]:
        """The whole words in its name: "linear_1" does not contain "in"."""
        own = self.name.rpartition(".")[2].lower()
        return {own, *own.split("_")}

    @property
    def multiplies(self) -> bool:
        return self.kind in ("linear", "transposed")


class Choice(NamedTuple):
    """How a layer is split, why, and in how many fused parts, each split separately."""

    split: Split
    why: str
    parts: int = 1


@dataclass(frozen=True)
class LayersAlike:
    """Layers with the same name in equal blocks, and their common split."""

    pattern: str  # with * for the number of a block
    layers: tuple[Layer, ...]
    split: Split
    why: str
    parts: int

    @property
    def numel(self) -> int:
        """Parameters of all its layers; tied weights count where they come first."""
        return sum((not one.tied) * prod(one.shape) + one.bias * one.shape[-1] for one in self.layers)

    def kept(self, ranks: int) -> int:
        """Parameters that one rank keeps."""
        if self.split in ("summed", "whole"):
            return self.numel
        biases = sum(one.bias * one.shape[-1] for one in self.layers) if self.split == "inputs" else 0
        return (self.numel - biases) // ranks + biases


@dataclass(frozen=True)
class TensorParallel:
    """The plan that `derive` makes. `groups` are the attentions and pairs that are split, by the path of the module around them."""

    ranks: int
    rows: tuple[LayersAlike, ...]
    groups: Mapping[str, tuple[str, ...]]

    @property
    def numel(self) -> int:
        return sum(row.numel for row in self.rows)

    @property
    def kept(self) -> int:
        """Parameters that one rank keeps: its share of split ones, and all whole ones."""
        return sum(row.kept(self.ranks) for row in self.rows)

    @property
    def all_reduces(self) -> tuple[int, ...]:
        """Numbers per token in each all-reduce of a forward and a backward pass, in order."""
        by = {split: [one for row in self.rows if row.split == split for one in row.layers] for split in SPLITS}
        forward = [one.shape[1] for one in by["rows"] + by["inputs"]]
        backward = [one.shape[1] for one in by["inputs"]] + [one.shape[0] for one in by["gathered"]]
        return tuple(forward + backward)

    def choices(self) -> dict[str, tuple[Layer, LayersAlike]]:
        """Each layer and its split, by the layer's name."""
        return {one.name: (one, row) for row in self.rows for one in row.layers}


class Waiting(NamedTuple):
    """Predicted seconds of one micro-batch with all-reduces over a link: waiting, and work."""

    waiting: float
    work: float

    @property
    def utilization(self) -> float:
        return self.work / (self.work + self.waiting)


def waiting(plan: TensorParallel, link: Link, tokens: int, flops_per_second: float) -> Waiting:
    """Time of a micro-batch of `tokens` with the all-reduces of `plan` over `link`, none of which can be overlapped. It is a lower bound:
    each all-reduce takes the link's delay once and sends 2·(n−1)/n of its fp32 activations; the work is 6 operations for each token
    and each parameter that multiplies.
    """
    n = plan.ranks
    nbytes = sum(4 * tokens * width * 2 * (n - 1) / n for width in plan.all_reduces)
    looked_up = sum(row.numel for row in plan.rows if row.layers[0].kind == "embedding" and row.split != "heads")
    heads = {one.tied for row in plan.rows for one in row.layers if one.multiplies and one.tied}
    tied = sum(prod(one.shape) for row in plan.rows for one in row.layers if one.name in heads)
    operations = 6 * (plan.numel - looked_up + tied) * tokens
    ways = len(plan.all_reduces) * link.delay_seconds if n > 1 else 0.0
    return Waiting(ways + 8 * nbytes / link.bits_per_second, operations / flops_per_second / n)


def derive(layers: Sequence[Layer], ranks: int) -> TensorParallel:
    """The tensor-parallel plan of a model: which layers are split over the ranks, how, and what stays whole.

    Args:
        layers: of the model, from `thinwire.lab.plan.split.layers_of`.
        ranks: number of ranks.

    Raises:
        ConfigurationError: less than one rank.

    >>> plan = derive([Layer("mlp.up", "linear", (64, 256)), Layer("mlp.down", "linear", (256, 64))], ranks=2)
    >>> [plan.choices()[name][1].split for name in ("mlp.up", "mlp.down")]
    ['outputs', 'inputs']
    """
    if ranks < 1:
        raise ConfigurationError(f"ranks={ranks}: at least 1 is needed.")
    vocabularies = {one.shape[0] for one in layers if one.kind == "embedding"}
    heads = {one.name for one in layers if _is_head(one, vocabularies)}
    chosen: dict[str, Choice] = {}
    split_groups: dict[str, tuple[str, ...]] = {}
    for alike in _by_pattern(_groups(one for one in layers if one.name not in heads)).values():
        found = [_choose(path, members, ranks) for path, members in alike.items()]
        refused = next((one for one in found if isinstance(one, str)), None)
        for (path, members), choices in zip(alike.items(), found, strict=True):
            if refused is not None or isinstance(choices, str):
                chosen |= {one.name: Choice("whole", refused or "") for one in members if one.multiplies}
            else:
                chosen |= choices
                split_groups[path] = tuple(choices)
    for one in layers:
        chosen.setdefault(one.name, _alone(one, ranks, one.name in heads))
    for one in layers:  # tied layers are split alike, or stay whole
        both = chosen[one.name], chosen.get(one.tied, chosen[one.name])
        if one.tied and {choice.split for choice in both} - {"rows", "gathered"}:
            clash = Choice("whole", f"{one.name} and {one.tied} are one weight, and cannot be split alike")
            whole = next((choice for choice in both if choice.split == "whole"), clash)
            chosen |= {one.name: whole, one.tied: whole}
    rows: dict[tuple[str, Choice, tuple[int, ...]], list[Layer]] = {}
    for one in layers:
        rows.setdefault((_pattern(one.name), chosen[one.name], one.shape), []).append(one)
    return TensorParallel(
        ranks,
        tuple(LayersAlike(name, tuple(m), c.split, c.why, c.parts) for (name, c, _), m in rows.items()),
        split_groups,
    )


def _pattern(name: str) -> str:
    """The name with * for numbers of blocks, which are inside a path; a number at its end is the layer's name."""
    return re.sub(r"(^|\.)\d+(?=\.)", r"\1*", name)


def _by_pattern(groups: Mapping[str, list[Layer]]) -> dict[str, dict[str, list[Layer]]]:
    alike: dict[str, dict[str, list[Layer]]] = {}
    for path, members in groups.items():
        alike.setdefault(_pattern(path + "."), {})[path] = members
    return alike


def _attention(name: str) -> str:
    """The path of the attention that a layer is in, or ""."""
    parts = name.split(".")
    for number, part in enumerate(parts[:-1], 1):
        if re.search("attn|attention", part.lower()) and "norm" not in part.lower():
            return ".".join(parts[:number])
    return ""


def _groups(layers: Iterable[Layer]) -> dict[str, list[Layer]]:
    """Groups of layers by path: all layers of an attention, or parallel layers of one module."""
    groups: dict[str, list[Layer]] = {}
    for one in layers:
        around = _attention(one.name) or one.name.rpartition(".")[0]
        groups.setdefault(around, []).append(one)
        if one.kind == "other" and not _attention(one.name):  # the name of a norm beside the layers is one part longer
            groups.setdefault(around.rpartition(".")[0], []).append(one)
    return groups


def _choose(path: str, members: Sequence[Layer], ranks: int) -> dict[str, Choice] | str:
    """A choice for each layer of a group that is split; or the reason why the group stays whole."""
    if _attention(f"{path}.x"):
        return _of_attention(members, ranks)
    found = _of_pair([one for one in members if one.multiplies and not one.tied], ranks)
    if isinstance(found, str):
        return found
    hidden = next(one.shape[0] for one in members if one.name in found and found[one.name].split == "inputs")
    between = [one.name for one in members if one.kind == "other" and prod(one.shape) == hidden]
    return f"{between[0]} looks at all {hidden} numbers that would be split" if between else found


def _of_attention(members: Sequence[Layer], ranks: int) -> dict[str, Choice] | str:
    linear = [one for one in members if one.multiplies]
    into = [one for one in linear if one.words & (_QKV | _FUSED)]
    out = [one for one in linear if one not in into]
    if not into or len(out) != 1:
        return "an attention without q, k, v (or qkv) and one o, by their names"
    inner, head = out[0].shape[0], out[0].head_width
    if not head or inner % head:
        return "an attention that does not declare its head width"
    if any(one.tied for one in linear):
        return "an attention that shares weights with other layers"
    chosen = {out[0].name: Choice("inputs", "attention: o by inputs; an all-reduce sums it")}
    for one in into:
        parts = 3 if one.words & _FUSED else 1
        if len(one.words & _QKV) > 1 or one.shape[1] % (parts * head) or (parts == 3 and one.shape[1] != 3 * inner):
            return f"{one.name}: fused in an unknown order"
        if (heads := one.shape[1] // parts // head) % ranks:
            return f"{one.name}: {heads} heads are not divisible by {ranks} ranks"
        fused = f"attention: each of {parts} fused parts by outputs" if parts > 1 else "attention: q, k, v by outputs"
        chosen[one.name] = Choice("outputs", f"{fused}, {heads // ranks} of {heads} heads a rank", parts)
    for one in members:
        if one.kind == "embedding" and one.shape[1] * head == inner:
            chosen[one.name] = Choice("heads", "attention: a bias of each head goes with the head")
        elif one.kind == "other" and prod(one.shape) in ({head, 2 * head} - {inner, into[0].shape[0]}):
            chosen[one.name] = Choice("summed", "attention: whole, for every head; its gradient is summed over ranks")
        elif not one.multiplies:
            return f"{one.name} in the attention: its use of the heads is not known"
    return chosen


def _of_pair(linear: Sequence[Layer], ranks: int) -> dict[str, Choice] | str:
    """Choices for parallel layers: those that widen, and one that narrows again."""
    if len(linear) < 2:
        return "no layer beside it narrows (or widens) again"
    chosen: dict[str, Choice] = {}
    turn: Split = "inputs"
    for one in sorted(linear, key=lambda one: one.name):
        inputs, outputs = one.shape
        turn, why = ("outputs" if turn == "inputs" else "inputs"), "in turn"
        if one.words & (_WIDENS | _NARROWS):
            turn, why = ("outputs" if one.words & _WIDENS else "inputs"), "by its name"
        elif inputs != outputs:
            turn, why = ("outputs" if inputs < outputs else "inputs"), "by its shape"
        told = "by inputs; an all-reduce sums it" if turn == "inputs" else "by outputs"
        chosen[one.name] = Choice(turn, f"a pair: {told} ({why})")
    wide = [one for one in linear if chosen[one.name].split == "outputs"]
    narrow = [one for one in linear if chosen[one.name].split == "inputs"]
    ends = {one.shape for one in wide} | {one.shape[::-1] for one in narrow}
    if len(narrow) != 1 or not wide or len(ends) != 1:
        return "the layers beside it do not form a pair that widens and narrows"
    if narrow[0].shape[0] % ranks:
        return f"{narrow[0].shape[0]} inputs of {narrow[0].name} are not divisible by {ranks} ranks"
    return {one.name: chosen[one.name] for one in (*wide, *narrow)}


def _is_head(one: Layer, vocabularies: set[int]) -> bool:
    return one.kind == "linear" and one.shape[1] in vocabularies and (bool(one.tied) or "head" in one.words)


def _alone(one: Layer, ranks: int, is_head: bool) -> Choice:
    """The choice for a layer outside of groups."""
    if one.kind == "other":
        return Choice("whole", "a norm, or a parameter outside of layers")
    if one.kind == "embedding" and (one.words & _POSITIONS or _attention(one.name)):
        return Choice("whole", "a table of positions")
    if one.kind != "embedding" and not is_head:
        return Choice("whole", "no rule")
    if (tokens := one.shape[1] if is_head else one.shape[0]) % ranks:
        return Choice("whole", f"{tokens} tokens are not divisible by {ranks} ranks")
    if is_head:
        return Choice("gathered", "the head by outputs; logits are gathered")
    return Choice("rows", "a table by rows; an all-reduce sums the rows that were found")
