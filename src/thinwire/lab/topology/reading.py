"""Reads the setting `topology`: what the entry point `thinwire.settings` names."""

from __future__ import annotations

from pathlib import Path

from thinwire.catalogue.parsing import parse, pieces_of
from thinwire.choices import listed
from thinwire.errors import ConfigurationError
from thinwire.lab.topology import Topology, read_edges


def topology_of(text: str) -> Topology:
    """A graph by its name, in small letters too (`ring`, `random_pairs`), or from a file of edges. Raises `ConfigurationError`."""
    if text.endswith(".json"):
        return read_edges(Path(text))
    known = {name.lower(): name for name in pieces_of(Topology)}
    name = known.get(text.strip().replace("-", "").replace("_", "").lower(), text)
    made = parse(name, offered=sorted(known.values()), own_files=True)
    if not isinstance(made, Topology):
        raise ConfigurationError(
            f"topology={text!r} is a {type(made).__name__}; one of {listed(sorted(known.values()), 'thinwire docs gossip')} is needed."
        )
    return made
