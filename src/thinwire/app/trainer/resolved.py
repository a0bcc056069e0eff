"""What a run's settings come to: its method and its inner optimizer, made and checked once."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from thinwire.app.trainer.settings import MethodSpec
from thinwire.catalogue.parsing import parse, pieces_of
from thinwire.drivers.attached import Method
from thinwire.errors import ConfigurationError
from thinwire.pieces.inner import Inner
from thinwire.pieces.inner_optimizers import AdamW
from thinwire.strategy import Strategy


@dataclass(frozen=True)
class Plan:
    """The pieces of a run. Whoever has a plan need not check its pieces again.

    Args:
        settings: the settings that it was made from: see `resolve`.
        composition: the strategy, or the method with its own loop, with the run's seed.
        inner: the inner optimizer: the one that is set, otherwise the strategy's own, otherwise AdamW.
    """

    settings: tuple[MethodSpec, str | None, float, int]
    composition: Strategy | Method
    inner: Inner


def resolve(method: MethodSpec, optimizer: str | None, clip: float, seed: int) -> Plan:
    """Make the pieces that these settings name.

    Raises:
        ConfigurationError: a piece is unknown, or the pieces do not go together.

    >>> resolve(MethodSpec(strategy="diloco", every=50), None, clip=1.0, seed=1).composition.seed
    1
    """
    made = method.composition(clip)
    if made.seed != seed:
        made = dataclasses.replace(made, seed=seed)  # type: ignore[type-var]
    return Plan((method, optimizer, clip, seed), made, _inner(made, optimizer, method.label))


def _inner(made: Strategy | Method, asked: str | None, label: str) -> Inner:
    own = None if made.own_loop else made.inner
    if asked is None:
        return own or AdamW()
    inner = parse(asked, offered=pieces_of(Inner), own_files=True)
    if not isinstance(inner, Inner):
        raise ConfigurationError(f"optimizer={asked!r}: AdamW, SGD(...), Muon or SAM(...) is needed.")
    if made.own_loop:
        raise ConfigurationError(f"optimizer={asked!r} with {label}: that method is an optimizer itself; leave it out.")
    if own and inner != own:
        raise ConfigurationError(
            f"optimizer={asked!r} with {label}: that method needs its own inner optimizer, {own}; leave it out, or "
            "give a Strategy(...) with another inner."
        )
    return inner
