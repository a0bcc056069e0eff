"""The table of attacks, and their parser. To add an attack, write it in `lab/robust/attacks.py` and add one row here."""

from __future__ import annotations

from typing import Any

from thinwire.catalogue.parsing import parse
from thinwire.choices import listed
from thinwire.errors import ConfigurationError
from thinwire.lab.robust.attacks import (
    ALIE,
    IPM,
    Attack,
    Dissensus,
    Gaussian,
    LabelFlip,
    Mimic,
    NotFinite,
    Replay,
    SignFlip,
    Switch,
    Sybils,
)

ATTACKS: dict[str, type[Attack]] = {
    kind.__name__: kind
    for kind in (SignFlip, IPM, ALIE, Gaussian, Mimic, NotFinite, Dissensus, Replay, LabelFlip, Switch, Sybils)
}


def attack_of(text: str) -> Attack:
    """Parse an attack, in letters of any case: alie, 'IPM(0.1)', 'Switch(ALIE(), 3)'. Raises `ConfigurationError`."""
    by_lower: dict[str, Any] = {name.lower(): kind for name, kind in ATTACKS.items()}
    plain = by_lower.get(text.strip().replace("_", "").replace("-", "").lower())
    made = plain() if plain else parse(text, ATTACKS)
    if not isinstance(made, Attack):
        raise ConfigurationError(f"attack={text!r}: one of {listed(ATTACKS, 'thinwire docs robust')} is needed.")
    return made
