"""Three values of two bits, as a package of its own."""

from thinwire.app.cli.verbs import Verb

VERB = Verb("show what numbers become in two bits", "thinwire_ternary.command")
