"""The version of the code, which replicas compare and files carry."""

__version__ = "0.1.0"
