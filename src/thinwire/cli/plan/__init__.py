"""`thinwire plan`, and the commands beside it."""

from thinwire.cli.plan.command import Options, main

__all__ = ["Options", "main"]
