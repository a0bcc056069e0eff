"""`thinwire simulate`: one study a file."""

from thinwire.cli.simulate.command import main

__all__ = ["main"]
