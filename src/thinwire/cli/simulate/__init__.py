"""`thinwire simulate`: one file for each study."""

from thinwire.cli.simulate.command import main

__all__ = ["main"]
