"""`thinwire plan`, and its further commands."""

from thinwire.app.cli.plan.command import Options, main

__all__ = ["Options", "main"]
