"""`thinwire simulate`: one file for each study."""

from thinwire.lab.cli.simulate.command import main

__all__ = ["main"]
