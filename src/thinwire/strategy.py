"""The composition of pieces into a method: a frozen value that validates itself, prints, and can be parsed from its text."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from itertools import pairwise
from typing import Any, ClassVar, Literal, get_args

import torch
from torch import nn

from thinwire import kernels
from thinwire.codecs import Codec, Identity, Shapes, in_full, warm_up
from thinwire.codecs.base import check_kept
from thinwire.errors import ConfigurationError
from thinwire.exchange import Direct, Exchange
from thinwire.pieces.aggregate import Aggregate, Mean
from thinwire.pieces.feedback import Feedback
from thinwire.pieces.filters import Filter, check_filters
from thinwire.pieces.guard import Guard, Privacy
from thinwire.pieces.inner import Inner, check_momentum
from thinwire.pieces.merge import Merge, Mix
from thinwire.pieces.outer import Average, Outer
from thinwire.pieces.partition import Partition, Whole
from thinwire.pieces.piece import Piece, check_piece
from thinwire.pieces.policy import LONG_RUN, Constant, Deciding, Policy
from thinwire.pieces.schedule import Adaptive, Every, Schedule


@dataclass(frozen=True)
class Deltas:
    """Exchange deltas: anchor − parameters, after inner steps.

        Δ = anchor − θ

    *Source*: the outer gradient of DiLoCo (Douillard et al., arXiv 2311.08105, Algorithm 1). *Differs*: nothing.

    >>> Deltas()
    Deltas()
    """

    needs_fixed_group: ClassVar[str] = ""


@dataclass(frozen=True)
class Gradients:
    """Exchange the gradient before every inner step. Parameters stay equal by themselves, so no anchors are kept.

        g ← 1/M · Σ_m ∇f_m(θ)      on the batch of each replica m, then the inner optimizer's step

    Optimizers must round alike for that: `SGD().make(...)` does, torch's own do not on unlike processors. So after every hundredth
    inner step replicas compare their weights (24 bytes to each other one). If these have drifted apart, all take those of
    replica 0 (4 bytes per parameter more, from replica 0 to each other one), with one warning event. *Source*: none; data parallelism.

    >>> Gradients()
    Gradients()
    """

    needs_fixed_group: ClassVar[str] = "are exchanged at every step, and the replicas keep no anchors to resume from"


@dataclass(frozen=True, kw_only=True, repr=False)
class Strategy:
    """A method of low-communication training as a composition of pieces.

        x̂ ← aggregate(exchange(codec(feedback(filters(signal))))),   anchor ← outer(anchor, x̂),   θ ← merge(θ, anchor)

    It is a frozen value. `repr` is Python that makes the same value again, and `parse` reads it without running code.
    *Source*: none; each piece names its own.

    Args:
        schedule: at which inner steps each fragment departs and lands.
        partition: how the model is cut into fragments.
        codec: how a delta becomes bytes.
        policy: which codec a round has, if that changes over time.
        filters: what transforms a signal before feedback and codec, in this order, and its estimate after them.
        feedback: what keeps the codec's loss for later rounds; None: it is lost.
        exchange: how packets travel and become one estimate.
        aggregate: the estimate of the values of all replicas, such as their mean.
        outer: the outer step, from an anchor and an estimate to the next anchor.
        merge: how a landed anchor is mixed into the parameters.
        signal: what is exchanged: deltas after inner steps, or gradients before each.
        inner: the inner optimizer that the method needs; None: any.
        privacy: clips deltas and adds noise; None: off.
        guard: clips a replica's own delta that is out of all proportion; None: off.
        anchors: where anchors and outer state are kept: in "host" memory, on the model's "device", or on "disk".
        state_dtype: the type of outer state and feedback, "fp32" or "bf16".
        seed: of all random draws of codecs, a whole number.

    Raises:
        ConfigurationError: these pieces cannot work together; the message says which, and what to choose.

    >>> from thinwire.codecs import E3M0
    >>> from thinwire.catalogue.parsing import parse
    >>> from thinwire.pieces.outer import Nesterov
    >>> from thinwire.pieces.partition import Strided
    >>> from thinwire.pieces.schedule import Staggered
    >>> s = Strategy(schedule=Staggered(every=30, delay=5), partition=Strided(4), codec=E3M0(), outer=Nesterov())
    >>> parse(repr(s)) == s
    True
    """

    schedule: Schedule | Adaptive = Every(1)
    partition: Partition = Whole()
    codec: Codec = Identity()
    policy: Policy = Constant()
    filters: tuple[Filter, ...] = ()
    feedback: Feedback | None = None
    exchange: Exchange = Direct()
    aggregate: Aggregate = Mean()
    outer: Outer = Average()
    merge: Merge = Mix()
    signal: Deltas | Gradients = Deltas()
    inner: Inner | None = None
    privacy: Privacy | None = None
    guard: Guard | None = Guard()
    anchors: Anchors = "host"
    state_dtype: StateDtype = "fp32"
    seed: int = 0

    own_loop: ClassVar[Literal[False]] = False  # a method with its own loop says True

    @property
    def exchanges_gradients(self) -> bool:
        """Whether replicas exchange the gradient before every inner step, and keep no anchors."""
        return isinstance(self.signal, Gradients)

    def __post_init__(self) -> None:
        protocols: dict[str, Any] = {"schedule": Schedule | Adaptive, "partition": Partition, "codec": Codec}
        protocols |= {"policy": Policy, "exchange": Exchange, "aggregate": Aggregate, "outer": Outer, "merge": Merge}
        for name, protocol in protocols.items():
            check_piece(name, getattr(self, name), protocol)
        object.__setattr__(self, "exchange", self.exchange.seeded(self.seed))
        kinds: dict[str, Any] = {"signal": Deltas | Gradients, "feedback": Feedback | None}
        kinds |= {"privacy": Privacy | None, "guard": Guard | None}
        for name, kind in kinds.items():
            if not isinstance(getattr(self, name), kind):
                needed = " or ".join(f"{one.__name__}()" for one in kind.__args__).replace("NoneType()", "None")
                raise ConfigurationError(f"{name}={getattr(self, name)!r}: {needed} is needed.")
        for codec in self.policy.codecs(self.codec):
            self._check_codec(codec)
        self._check_momentum()
        self._check_aggregate()
        if isinstance(self.policy, Deciding) and not self.exchange.traits.sends_own:
            raise ConfigurationError(
                f"{self.policy} with {self.exchange}: the policy measures replica 0's own values, and this exchange sends sums; choose Direct()."
            )
        self._check_privacy()
        self.exchange.check_beside(self)
        deltas = isinstance(self.signal, Deltas) and self.exchange.traits.agrees
        check_anchors(self.anchors, self.schedule, self.merge, deltas)
        check_state_dtype(self.state_dtype, deltas)
        self._check_period()
        plain = (Every(1), Average(), Mix())
        if self.exchanges_gradients and (self.schedule, self.outer, self.merge) != plain:
            raise ConfigurationError(
                f"Gradients() with {self.schedule!r}, {self.outer!r}, {self.merge!r}: gradients are exchanged at every step, and the inner "
                "optimizer is the outer one; leave schedule, outer and merge at Every(1), Average() and Mix()."
            )

    def __repr__(self) -> str:
        """The text of the dataclass, without aggregate, guard and state_dtype if they are the defaults."""
        usual = {"aggregate": Mean(), "guard": Guard(), "state_dtype": "fp32"}
        named = [f.name for f in fields(self) if f.name not in usual or getattr(self, f.name) != usual[f.name]]
        return f"Strategy({', '.join(f'{name}={getattr(self, name)!r}' for name in named)})"

    def _check_aggregate(self) -> None:
        """Refuse an aggregate that is not a mean with pieces that need one."""
        reason = ""
        if self.aggregate.linear:
            return
        if not self.exchange.traits.gathers:
            reason = f"{self.exchange} adds up parts on the way; choose Direct() or TwoShot()"
        elif self.aggregate.needs_products and not self.exchange.traits.multiplies:
            reason = f"{self.exchange} has no inner products of whole fragments, which it needs; choose Direct() or TwoShot()"
        elif self.codec.joint:
            reason = f"{self.codec} combines the packets of all replicas itself; choose the codec inside it"
        elif self.feedback and self.feedback.kappa:
            reason = (
                f"{self.feedback} keeps the mean of all references, and would drift from what is agreed; choose kappa=0"
            )
        elif self.merge.eager:
            reason = f"{self.merge} counts the own delta as a share of the mean; choose Mix()"
        elif self.privacy:
            reason = f"with {self.privacy} one replica may count for all; choose Mean()"
        if reason:
            raise ConfigurationError(f"aggregate={self.aggregate!r} is no mean over all replicas: {reason}.")

    def _check_period(self) -> None:
        """Check that merge and outer step fit the duration of a flight."""
        every, delay = self.schedule.every, self.schedule.delay
        if not self.merge.whole_period and delay >= every:
            raise ConfigurationError(
                f"delay={delay} with every={every}: 0 <= delay < every is needed, so at most {every - 1}; "
                "for a whole period of delay choose eager updates, or Reset()."
            )
        if self.merge.whole_period and (delay != every or isinstance(self.schedule, Adaptive)):
            raise ConfigurationError(
                f"{self.merge} with delay={delay}, every={every}: such a round takes a whole period; choose delay={every}, and "
                "Every or Staggered."
            )
        self.merge.check(delay, self.feedback)
        if self.merge.eager and not self.outer.linear:
            raise ConfigurationError(
                f"{self.merge} with {self.outer!r}: a linear outer step is needed; choose Nesterov or Average."
            )
        if self.outer.needs_whole_period and not self.merge.whole_period:
            raise ConfigurationError(
                f"{self.outer} with {self.merge}: gap corrects for how far the anchor moves during a flight, which needs rounds of a whole "
                "period; choose gap=0, or merge=Reset() with delay=every."
            )

    def _check_privacy(self) -> None:
        reason = ""
        if self.feedback:
            reason = (
                f"{self.feedback} adds older deltas to what was clipped, so that no bound holds; leave feedback=None"
            )
        elif self.exchanges_gradients:
            reason = "Gradients() sends one for every step, unclipped; choose Deltas(), with Every(1) if each step is to be exchanged"
        elif self.merge.eager:
            reason = f"{self.merge} counts the own delta as it was before clip and noise; choose Mix()"
        elif self.merge.whole_period:
            reason = f"{self.merge} sends again what was in a dropped round; choose Mix()"
        elif self.merge.keeps_flight:
            reason = f"{self.merge} takes the noise of a delta out again with the next; choose Mix()"
        elif self.filters:
            reason = f"{self.filters} may send more of older deltas than one clip allows; leave filters=()"
        elif not self.policy.constant:
            reason = f"{self.policy} may choose the codec by the data; choose Constant()"
        elif self.codec.joint:
            reason = f"with {self.codec} one replica may count for all; choose the codec inside it"
        if self.privacy and reason:
            raise ConfigurationError(f"{self.privacy} cannot be kept here: {reason}.")

    def _check_codec(self, codec: Codec) -> None:
        if self.feedback:
            self.feedback.check(codec)
        check_kept(codec, self.feedback)
        self.exchange.check(codec, self.feedback)
        if self.exchange.feedback and (codec.grain or 1) != (self.codec.grain or 1):
            raise ConfigurationError(
                f"{self.policy} with {self.exchange}: {codec} has the grain {codec.grain}, {self.codec} {self.codec.grain}; owners' residuals "
                "belong to shards, which are cut at the grain, so all codecs need the same grain; choose another `dense` or block."
            )

    def _check_momentum(self) -> None:
        """Filters that fit, and one owner of momentum before and after the exchange."""
        check_filters(self.filters)
        if self.inner is not None and (not isinstance(self.inner, Inner) or isinstance(self.inner, type)):
            raise ConfigurationError(f"inner={self.inner!r}: AdamW(), SGD(), Muon(), SAM() or None (any) is needed.")
        owner = next((one for one in self.filters if one.momentum), None)
        if owner and self.outer.init(torch.zeros(1)):
            raise ConfigurationError(
                f"{owner} with {self.outer}: momentum before the exchange and after it, one owner is needed; choose Average() or "
                "Nesterov(lr, momentum=0.0), or take the filter out."
            )

    @property
    def guards(self) -> bool:
        """Whether the guard looks at deltas: gradients and what gossip sends are none."""
        return self.guard is not None and isinstance(self.signal, Deltas) and self.exchange.traits.agrees

    @property
    def pieces(self) -> tuple[Piece, ...]:
        """The pieces that take part in a round, in the order in which they are checked."""
        first = (self.exchange, self.aggregate, self.schedule, self.signal, self.privacy, self.policy)
        pieces = (*first, *self.filters, self.merge, self.feedback, self.outer, self.codec)
        return tuple(piece for piece in pieces if piece is not None)

    def check_inner(self, optimizer: torch.optim.Optimizer, sharded: bool) -> None:
        """Raise `ConfigurationError` unless a replica may train with `optimizer`, and in shards if it is `sharded`."""
        if sharded and any(one.needs_whole for one in self.filters):
            raise ConfigurationError(
                f"{self.filters} on a sharded replica: Clip needs the norm of a whole replica's signal, a rank has its shard's; choose "
                "clip=0, or one rank a replica."
            )
        owner = next((one for one in self.filters if one.momentum), None)
        if self.inner is not None:
            self.inner.check(optimizer)
        elif owner and self.exchanges_gradients:
            check_momentum(optimizer, owner)

    def warm_up(self) -> None:
        """Have all compiled that a round needs, so that the first one does not wait for it."""
        for codec in self.policy.codecs(self.codec):
            warm_up(codec)
        few = torch.zeros(1)
        self.outer.step(few, few, self.outer.init(few))
        if self.merge.keeps_flight:
            kernels.of(few).carry(few, few, few, few)

    def nbytes_per_period(self, fragments: Sequence[int | Shapes], size: int, number: int = LONG_RUN) -> int:
        """Bytes one replica of `size` sends in one period of `every` inner steps, for fragments of so many elements, or of tensors of such shapes
        (the same but for a codec that needs shapes): in their round `number`, or in the long run. Predicted = counted, or the most (`bound`)."""
        shaped = [((fragment,),) if isinstance(fragment, int) else fragment for fragment in fragments]
        return sum(self.exchange.nbytes_sent(*self.coded(shapes, number), size) for shapes in shaped)

    def coded(self, shapes: Shapes, number: int = LONG_RUN, last: bool = False) -> tuple[Codec, int]:
        """The codec of round `number` of a fragment with tensors of these `shapes`, `last` in the run or not, and its number of elements. If
        the policy decides by the data, it is the codec before the first decision."""
        codec, numel = self.codec.fitted(shapes), sum(map(math.prod, shapes))
        if number < max((one.full for one in self.filters), default=0):
            return in_full(codec), numel
        return (self.policy.last if last else self.policy).at(codec, numel, number, self.policy.init(codec)), numel

    @property
    def bound(self) -> str:
        """A remark on predicted bytes if they are a bound; empty if they are exact."""
        of: list[object] = [self.codec] if any(codec.varies for codec in self.policy.codecs(self.codec)) else []
        of += [one for one in self.filters if one.full > LONG_RUN]
        said = f"sizes of {' and '.join(map(str, of))} depend on the values; bytes that are predicted are the most it sends"
        return said if of else ""

    def choices(self, fragments: Sequence[Shapes], size: int) -> list[str]:
        """The exchange that was chosen for fragments with these shapes, and the reason; empty if there is no choice."""
        return self.exchange.why([self.coded(shapes) for shapes in fragments], size)

    def warnings(self, fragments: Sequence[Shapes] = (), size: int = 2) -> list[str]:
        """What works, but not as its source has it, or is of no use for fragments of tensors of such shapes."""
        said, both = [], (fragments, [((1024, 1024),)])
        of_both = [(of, max(1, sum(math.prod(s) for shapes in of for s in shapes))) for of in both]
        bits, large = (8 * self.nbytes_per_period(of, size) / numel / max(1, size - 1) for of, numel in of_both)
        if bits >= 16 and bits > 2 * large:  # half of fp32, for shapes that this codec is not made for
            said.append(
                f"{self.codec} sends {bits:.3g} bits a parameter here (predicted), {large:.2g} of a large matrix: most tensors of this "
                "model are too small or too thin for it. Another codec, such as E3M0(), sends 4"
            )
        numels, block = [math.prod(shape) for shapes in fragments for shape in shapes], self.codec.grain or 0
        small, few_bits = [numel for numel in numels if numel < block], self.codec.nbytes(1 << 16) < 1 << 14
        if few_bits and sum(small) > 0.01 * sum(numels):  # in one bit the scale is all that tells sizes apart
            said.append(
                f"{len(small)} of {len(numels)} tensors are smaller than a block of {self.codec} and share its scale with others, which may "
                f"cost loss. Each({self.codec}, Sign(block=64), least={block}) keeps them apart"
            )
        if isinstance(self.schedule, Adaptive) and self.outer.init(torch.zeros(1)):
            said.append(
                f"{self.schedule} is made for averaging; under the momentum of {self.outer} a longer round is also a larger outer step. "
                "Take Average(), or a smaller momentum and rate"
            )
        return said

    def describe(self, model: nn.Module, size: int) -> str:
        """What this strategy does to `model` among `size` replicas, in a few lines, with predicted bytes."""
        self.exchange.check_size(size)
        fragments = self.partition.fragments(model)
        numels, shapes = [fragment.numel for fragment in fragments], [fragment.shapes for fragment in fragments]
        nbytes = self.nbytes_per_period(shapes, size)
        bits = 8 * nbytes / max(1, sum(numels)) / self.schedule.every
        least = "at least " if isinstance(self.schedule, Adaptive) else ""
        lines = [
            f"{len(fragments)} fragment(s), {sum(numels):,} parameters, exchanged every {least}{self.schedule.every} inner steps, "
            f"{self.schedule.delay} of them in the air",
            f"{nbytes:,} bytes sent per replica and period: {bits:.4g} bits per parameter and step (predicted)",
        ]
        lines += [self.bound] if self.bound else []
        if self.aggregate != Mean():
            tolerated = self.aggregate.tolerates(size)
            lines.append(f"aggregate: {self.aggregate}, of {size} replicas {tolerated} may send anything")
        if self.aggregate.needs_products:
            nbytes = len(fragments) * self.exchange.nbytes_products(size)
            lines.append(
                f"aggregate: {nbytes:,} bytes of inner products sent per replica and period, beside these (predicted)"
            )
        lines += [] if self.guards else ["guard: off" + (", which is for deltas only" if self.guard else "")]
        lines += [f"filters: {', '.join(map(str, self.filters))}"] if self.filters else []
        lines += [f"inner optimizer: {self.inner}"] if self.inner else []
        full = max((one.full for one in self.filters), default=0)
        if full > LONG_RUN:
            after = replace(self, filters=()).nbytes_per_period(shapes, size)
            lines.append(f"after the last round in fp32: {after:,} bytes a period (predicted)")
        for first, end in pairwise(sorted({0, *(n for n in (full, *self.policy.changes) if n <= LONG_RUN)})):
            early = self.nbytes_per_period(shapes, size, first)
            lines.append(f"rounds {first:,} to {end - 1:,} of a fragment: {early:,} bytes a period (predicted)")
        ends = sum(self.exchange.nbytes_sent(*self.coded(of, last=True), size) for of in shapes)
        said = f"the rounds that end a run: {ends:,} bytes (predicted)"
        lines += [said] if self.policy.last is not self.policy else []
        lines += [f"warning: {warning}" for warning in self.warnings(shapes, size)]
        lines += [f"exchange: {choice}" for choice in self.choices(shapes, size)]
        return "\n".join(lines + [f"  {f.name}: {f.numel:,} parameters" for f in fragments])


Anchors = Literal["host", "device", "disk"]
"""In host memory; on the model's device; or in a file, of which only those fragments are in memory that depart next or are in flight."""

StateDtype = Literal["fp32", "bf16"]
"""The type of outer state and feedback between two rounds of their fragment."""


def check_anchors(anchors: str, schedule: Schedule | Adaptive, merge: Merge, deltas: bool) -> None:
    """Raise `ConfigurationError` unless `anchors` is a known place and fits the other pieces. `deltas`: whether replicas agree on deltas."""
    if anchors not in get_args(Anchors):
        raise ConfigurationError(f"anchors={anchors!r}: 'host', 'device' or 'disk' is needed.")
    reason = ""
    if not deltas:
        reason = "gradients need no anchors, and gossip has none"
    elif isinstance(schedule, Adaptive):
        reason = f"{schedule} exchanges all fragments at once, so all would be in memory"
    elif merge.whole_period:
        reason = f"with {merge} every fragment is always in flight"
    if anchors == "disk" and reason:
        raise ConfigurationError(f"anchors='disk': {reason}; choose anchors='host', or deltas of fragments in turn.")


def check_state_dtype(dtype: str, deltas: bool) -> None:
    """Raise `ConfigurationError` unless `dtype` is known and fits. `deltas`: whether replicas agree on deltas."""
    if dtype not in get_args(StateDtype):
        raise ConfigurationError(f"state_dtype={dtype!r}: 'fp32' or 'bf16' is needed.")
    if dtype != "fp32" and not deltas:
        raise ConfigurationError(
            f"state_dtype={dtype!r}: state that every inner step changes would be rounded as often, and gossip has no outer state; choose 'fp32', "
            "or deltas."
        )
